"""``laps-patch``: inserts the LAPS seam into an installed sglang-router, or removes it."""
