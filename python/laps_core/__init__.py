"""What server, router and simulator share: policies and models. No SGLang, no torch, no clock.

Sources in docstrings: [L s3.1] is section 3.1 of LAPS (arXiv 2601.11589), [M] Medha (arXiv 2409.17264), [F] FlowPrefill
(arXiv 2602.16603); see docs/LAPS.md, References.
"""
