"""Model files: where they come from, how they get to this machine, and whether they are still what they were."""
