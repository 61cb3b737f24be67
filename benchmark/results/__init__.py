"""What is measured, from figures with their bars to the pieces of the report."""
