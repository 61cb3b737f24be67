"""Servers that prefill and decode by priority: at the limit of running requests urgent requests preempt streams."""

from __future__ import annotations

import asyncio
import random

import pytest
from rounds import repeat_until
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, run_on

from .colocated import FREQUENT_PAUSES, abort_some, mixed_requests, require_right_answers, send_all_at_their_times

BY_PRIORITY = (
    "--enable-priority-scheduling",
    "--priority-scheduling-preemption-threshold",
    "0",
    "--max-running-requests",
    "4",
)
SETUPS = [
    Setup(f"colocated-priorities-{name}", (*LAPS, *FREQUENT_PAUSES, *BY_PRIORITY, *flags), mode="null")
    for name, flags in (("overlap", ()), ("normal", NORMAL_LOOP))
]
pytestmark = [pytest.mark.timeout(600), *run_on(*SETUPS)]


def test_streams_retracted_by_priority_resume_with_correct_tokens(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    status = prefill.get("/laps_status")
    assert status["enabled"], status["reason"]

    said: list[str] = []

    def attempt(i: int) -> bool:
        requests = mixed_requests(900 + 100 * i, 40, f"{prefill.setup.name}-{i}", 3.0)
        rng = random.Random(3)
        for a in requests:
            a.priority = rng.randint(0, 3)
        abort_some(requests, random.Random(2))
        asyncio.run(send_all_at_their_times(prefill, requests))
        require_right_answers(requests, reference)
        prefill.require_all_tokens_free()
        after = prefill.get("/laps_status")
        assert after["in_progress"] == 0
        steps = after["decode"]["steps_in_pauses"] - status["decode"]["steps_in_pauses"]
        said.append(f"{steps} steps in pauses, {sum(a.retractions for a in requests)} streams made way")
        return steps > 0 and any(a.retractions for a in requests)

    repeat_until(attempt, "a stream makes way", lambda: said)
