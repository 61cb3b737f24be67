"""Faults of every kind while load runs through real servers; every request must have exactly one end."""
