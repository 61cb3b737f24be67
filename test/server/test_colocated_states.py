"""Servers that prefill and decode models with linear attention or state-space layers, which keep a state for each
request."""

from __future__ import annotations

import pytest
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, run_on

from .colocated import FREQUENT_PAUSES, serve_until_pauses_are_used, serve_until_streams_are_retracted

ROOMY, TIGHT = (
    Setup(f"colocated-states-{name}", (*LAPS, *FREQUENT_PAUSES, *flags), shape=shape, mode="null")
    for name, shape, flags in (
        ("overlap", "qwen3next", ()),
        ("tight", "nemotronh", ("--max-mamba-cache-size", "12", *NORMAL_LOOP)),
    )
)
"""Servers; the second can keep the states of four requests."""
pytestmark = pytest.mark.timeout(600)


@run_on(ROOMY, TIGHT)[0]
@run_on(ROOMY)[1]
def test_tokens_are_correct_and_memory_is_freed(prefill: Prefill, reference: Reference) -> None:
    serve_until_pauses_are_used(prefill, reference)


@run_on(ROOMY)[0]
@run_on(ROOMY)[1]
def test_streams_are_retracted_when_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    serve_until_streams_are_retracted(prefill, reference)
