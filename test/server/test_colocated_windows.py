"""Servers that prefill and decode models of which half of the layers see a window alone: these have KV of their own."""

from __future__ import annotations

import asyncio
import random

import pytest
from rounds import until_seen
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, on

from .colocated import EVERY_PAUSE, at_once, mixed, must_be_right, some_leave, until_streams_are_retracted

SETUPS = [
    Setup(f"colocated-windows-{name}", (*LAPS, *EVERY_PAUSE, *flags), shape="gptoss", mode="null")
    for name, flags in (("overlap", ()), ("tight", ("--swa-full-tokens-ratio", "0.22", *NORMAL_LOOP)))
]
"""The second has room for a chunk there and for the windows of a stream or two: 1,232 tokens."""
pytestmark = [pytest.mark.timeout(600), *on(*SETUPS)]


def test_every_token_is_right_and_both_pools_are_free_again(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    before = prefill.get("/laps_status")

    def once(i: int) -> bool:
        asked = mixed(500 + 100 * i, 40, f"{prefill.setup.name}-{i}", 2.0)
        some_leave(asked, random.Random(2))
        asyncio.run(at_once(prefill, asked))
        must_be_right(asked, reference)
        prefill.all_tokens_are_free()
        after = prefill.get("/laps_status")
        assert after["enabled"], after["reason"]
        assert after["in_progress"] == 0
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        return steps > 2 and after["preemption"]["by_short_batches"] > before["preemption"]["by_short_batches"]

    until_seen(once, "steps and short batches run in pauses")


def test_streams_are_retracted_where_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    until_streams_are_retracted(prefill, reference)
