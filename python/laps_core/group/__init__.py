"""Data-parallel attention ranks as one machine: what each offers, what all of them run next, what a step costs."""
