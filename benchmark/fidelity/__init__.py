"""Simulator and planner against real servers, which get the same arrivals."""
