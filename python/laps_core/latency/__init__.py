"""How long a step takes: the model, its fit, the boundary between short and long that follows from it."""
