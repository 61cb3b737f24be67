"""Data-parallel attention ranks planned as one machine: offers of each rank, the common choice, and the cost of a
step."""
