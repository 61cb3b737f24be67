"""Comparisons, each with a command of its own beside this folder."""
