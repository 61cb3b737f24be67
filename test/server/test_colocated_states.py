"""Servers that prefill and decode models with linear attention or state-space layers, which keep a state for each
request."""

from __future__ import annotations

import pytest
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, on

from .colocated import EVERY_PAUSE, until_pauses_are_used, until_streams_are_retracted

ROOMY, TIGHT = (
    Setup(f"colocated-states-{name}", (*LAPS, *EVERY_PAUSE, *flags), shape=shape, mode="null")
    for name, shape, flags in (
        ("overlap", "qwen3next", ()),
        ("tight", "nemotronh", ("--max-mamba-cache-size", "12", *NORMAL_LOOP)),
    )
)
"""Servers; the second can keep the states of four requests."""
pytestmark = pytest.mark.timeout(600)


@on(ROOMY, TIGHT)[0]
@on(ROOMY)[1]
def test_every_token_is_right_and_all_states_are_free_again(prefill: Prefill, reference: Reference) -> None:
    until_pauses_are_used(prefill, reference)


@on(ROOMY)[0]
@on(ROOMY)[1]
def test_streams_are_retracted_where_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    until_streams_are_retracted(prefill, reference)
