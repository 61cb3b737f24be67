"""Results: figures, their bars, and the pieces of the report."""
