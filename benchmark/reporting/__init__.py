"""From the pieces that benchmarks leave to one page; ``benchmark/report.py`` is the command."""
