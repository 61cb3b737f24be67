"""Test rig: a small model, real servers on loopback, and load for them."""
