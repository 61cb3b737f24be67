"""The planner: traffic in; what LAPS would bring, and the flags for it, out."""
