"""``laps-patch``: the LAPS seam put into an installed sglang-router and taken out again."""
