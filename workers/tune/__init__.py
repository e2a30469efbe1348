"""`workers tune`: which numbers of the engine's scheduler answer a sample of requests fastest on this machine."""
