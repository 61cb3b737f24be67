"""LAPS for the MiniLB router: two prefill pools by prompt length, kept in balance."""
