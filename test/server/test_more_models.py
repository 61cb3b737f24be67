"""Further architectures on servers that prefill and decode: the answers to mixed load equal those of the same server to
one request at a time. ``test_slices_models`` compares the most used architectures with transformers."""

from __future__ import annotations

import asyncio

import lean
import more_models
import pytest
from rounds import repeat_until
from served import LAPS, NORMAL_LOOP, Prefill, Setup, run_on

from .colocated import FREQUENT_PAUSES, mixed_requests, require_equal_answers, send_again, send_all_at_their_times

SETUPS = [
    Setup(f"more-{name}", (*LAPS, *FREQUENT_PAUSES, *NORMAL_LOOP[: i % 2]), shape=name, mode="null")
    for i, name in enumerate(more_models.ALL)
]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not lean.MORE_MODELS, reason="takes some minutes; LAPS_MORE_MODELS=1 runs it"),
    *run_on(*SETUPS),
]


def test_answers_under_load_equal_sequential_answers(prefill: Prefill) -> None:
    before = prefill.get("/laps_status")
    assert before["slices"]["on"], before["slices"]

    def attempt(i: int) -> bool:
        requests = mixed_requests(500 + 100 * i, 30, f"{prefill.setup.name}-{i}", 1.0)
        asyncio.run(send_all_at_their_times(prefill, requests))
        prefill.require_all_tokens_free()
        again = send_again(prefill, requests)
        require_equal_answers(requests, again)
        assert len({token for a in again for token in a.tokens}) > 20, "answers to all prompts are alike"
        prefill.require_all_tokens_free()
        after = prefill.get("/laps_status")
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        return steps > 3 and after["preemption"]["by_short_batches"] > before["preemption"]["by_short_batches"] + 3

    repeat_until(attempt, "steps and short batches run in pauses")
