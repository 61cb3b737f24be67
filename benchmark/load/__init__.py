"""The one load generator: jobs of a workload as requests, and what became of each."""
