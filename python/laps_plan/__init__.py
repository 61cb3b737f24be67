"""Prediction of what LAPS would gain on a model, a device and given traffic: simulator, device profiles, planner."""
