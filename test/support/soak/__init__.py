"""Soak test: an hour of mixed load, in which no process may grow."""
