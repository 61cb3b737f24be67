"""Load generator: sends the jobs of a workload and records an answer for each."""
