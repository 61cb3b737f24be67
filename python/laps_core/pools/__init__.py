"""The two prefill pools: pressures, demand, and moves of servers between them."""
