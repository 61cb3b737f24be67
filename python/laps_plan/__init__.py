"""Prediction of what LAPS would bring on a model, a device and some traffic: the simulator, profiles of devices, the
planner."""
