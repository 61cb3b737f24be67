"""Further architectures on servers that prefill and decode: the answers to mixed load equal those of the same server to
one request at a time. ``test_slices_models`` compares the most used architectures with transformers."""

from __future__ import annotations

import asyncio

import lean
import more_models
import pytest
from rounds import until_seen
from served import LAPS, NORMAL_LOOP, Prefill, Setup, on

from .colocated import EVERY_PAUSE, alone, at_once, mixed, must_be_as

SETUPS = [
    Setup(f"more-{name}", (*LAPS, *EVERY_PAUSE, *NORMAL_LOOP[: i % 2]), shape=name, mode="null")
    for i, name in enumerate(more_models.ALL)
]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not lean.MORE, reason="takes some minutes; LAPS_MORE_MODELS=1 runs it"),
    *on(*SETUPS),
]


def test_answers_are_those_of_one_request_at_a_time(prefill: Prefill) -> None:
    before = prefill.get("/laps_status")
    assert before["slices"]["on"], before["slices"]

    def once(i: int) -> bool:
        asked = mixed(500 + 100 * i, 30, f"{prefill.setup.name}-{i}", 1.0)
        asyncio.run(at_once(prefill, asked))
        prefill.all_tokens_are_free()
        again = alone(prefill, asked)
        must_be_as(asked, again)
        assert len({token for a in again for token in a.tokens}) > 20, "answers to all prompts are alike"
        prefill.all_tokens_are_free()
        after = prefill.get("/laps_status")
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        return steps > 3 and after["preemption"]["by_short_batches"] > before["preemption"]["by_short_batches"] + 3

    until_seen(once, "steps and short batches run in pauses")
