"""`producers analyze`: what a file will cost, and what caches and the planned order save, before anything runs."""
