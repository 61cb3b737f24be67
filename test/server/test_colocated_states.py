"""Servers that prefill and decode models of which most layers are linear attention: each request has states there."""

from __future__ import annotations

import asyncio
import random

import pytest
from rounds import until_seen
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, on

from .colocated import EVERY_PAUSE, at_once, mixed, must_be_right, some_leave, until_streams_are_retracted

ROOMY, TIGHT = (
    Setup(f"colocated-states-{name}", (*LAPS, *EVERY_PAUSE, *flags), shape="qwen3next", mode="null")
    for name, flags in (("overlap", ()), ("tight", ("--max-mamba-cache-size", "12", *NORMAL_LOOP)))
)
"""The second has room for the states of four requests."""
pytestmark = pytest.mark.timeout(600)


@on(ROOMY, TIGHT)[0]
@on(ROOMY)[1]
def test_every_token_is_right_and_all_states_are_free_again(prefill: Prefill, reference: Reference) -> None:
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


@on(ROOMY)[0]
@on(ROOMY)[1]
def test_streams_are_retracted_where_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    until_streams_are_retracted(prefill, reference)
