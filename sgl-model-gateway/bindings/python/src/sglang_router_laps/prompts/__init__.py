"""The prompts of a request: what counts of them, how many tokens that is, and what servers hold of it already."""
