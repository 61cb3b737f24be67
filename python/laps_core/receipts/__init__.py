"""Where the time to first token of a request went."""
