"""``laps-patch``: inserts the LAPS lines into an installed sglang-router, or removes them."""
