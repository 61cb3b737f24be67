"""Requests of clients and their times, for real servers and for simulated ones alike."""
