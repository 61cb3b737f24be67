"""Requests of clients and their times, for real and for simulated servers."""
