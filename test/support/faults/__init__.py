"""Fault campaign: faults of every kind while load runs through real servers; every request must end exactly once."""
