"""The two prefill pools: moves of servers between them, and the pool records that routers share."""
