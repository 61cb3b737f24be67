"""Scheduler variants compared on the same work, on real servers."""
