"""Servers that prefill and decode models with sliding windows, and a KV pool of their own, in half of the layers."""

from __future__ import annotations

import pytest
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, on

from .colocated import EVERY_PAUSE, until_pauses_are_used, until_streams_are_retracted

SETUPS = [
    Setup(f"colocated-windows-{name}", (*LAPS, *EVERY_PAUSE, *flags), shape="gptoss", mode="null")
    for name, flags in (("overlap", ()), ("tight", ("--swa-full-tokens-ratio", "0.22", *NORMAL_LOOP)))
]
"""Servers; the second can keep 1,232 tokens in that pool: a chunk and the windows of one or two streams."""
pytestmark = [pytest.mark.timeout(600), *on(*SETUPS)]


def test_every_token_is_right_and_both_pools_are_free_again(prefill: Prefill, reference: Reference) -> None:
    until_pauses_are_used(prefill, reference)


def test_streams_are_retracted_where_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    until_streams_are_retracted(prefill, reference)
