"""Replays: recorded requests of a server, run again under other policies in the simulator."""
