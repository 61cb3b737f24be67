"""Receipts: where the time to first token of a request went, and what the device did meanwhile."""
