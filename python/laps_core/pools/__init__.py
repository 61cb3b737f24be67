"""Which prefill server serves which class: pressures of the two pools, and when one moves."""
