"""Planner: predicts from traffic what LAPS would gain, and recommends flags."""
