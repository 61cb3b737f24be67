"""Time of a step: the latency model, its fit, and the boundary between short and long that follows from it."""
