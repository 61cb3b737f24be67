"""Reports of one scheduler: status and metrics, receipts, quotes."""
