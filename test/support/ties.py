"""Ties: tokens that are equally right, because rounding decides between them."""

TIE = 5e-4
"""Largest difference of two log-probabilities that another order of additions may reverse."""
