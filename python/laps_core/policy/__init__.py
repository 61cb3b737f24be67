"""Which batch runs next: the pacer, and the rules it asks."""
