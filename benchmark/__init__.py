"""Benchmarks, and the rig (models, servers, load) that they share with the demo and the tests."""
