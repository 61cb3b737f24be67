"""Servers that prefill and decode models with sliding windows, and a KV pool of their own, in half of the layers."""

from __future__ import annotations

import pytest
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, run_on

from .colocated import FREQUENT_PAUSES, serve_until_pauses_are_used, serve_until_streams_are_retracted

SETUPS = [
    Setup(f"colocated-windows-{name}", (*LAPS, *FREQUENT_PAUSES, *flags), shape="gptoss", mode="null")
    for name, flags in (("overlap", ()), ("tight", ("--swa-full-tokens-ratio", "0.22", *NORMAL_LOOP)))
]
"""Servers; the second can keep 1,232 tokens in that pool: a chunk and the windows of one or two streams."""
pytestmark = [pytest.mark.timeout(600), *run_on(*SETUPS)]


def test_tokens_are_correct_and_memory_is_freed(prefill: Prefill, reference: Reference) -> None:
    serve_until_pauses_are_used(prefill, reference)


def test_streams_are_retracted_when_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    serve_until_streams_are_retracted(prefill, reference)
