"""Policies and models, shared by server, router and simulator. No SGLang, no torch, no clock.

Sources in docstrings: LAPS is arXiv 2601.11589 (s3.1: its section 3.1), Medha arXiv 2409.17264, FlowPrefill arXiv
2602.16603; see docs/LAPS.md, References.
"""

__version__ = "0.2.0"
"""Version of all packages of this project."""
