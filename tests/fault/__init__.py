"""The fault suite: each fault, on both brokers, while a batch runs; one oracle (`aftermath.py`) for all of them."""
