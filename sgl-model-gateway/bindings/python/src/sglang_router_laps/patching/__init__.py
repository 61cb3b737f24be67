"""``laps-patch``: puts the LAPS seam into an installed sglang-router, and takes it out again."""
