"""A small model, real servers on loopback, and load for them."""
