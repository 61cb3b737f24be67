"""What operators see: counts, times to first token, status, metrics and page."""
