"""Scheduler variants compared on the same work, on real servers; ``benchmark/serve.py`` is the command."""
