"""Servers that prefill and decode by priority: at the limit of running requests urgent requests preempt streams."""

from __future__ import annotations

import asyncio
import random

import pytest
from rounds import until_seen
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, on

from .colocated import EVERY_PAUSE, at_once, mixed, must_be_right, some_leave

BY_PRIORITY = (
    "--enable-priority-scheduling",
    "--priority-scheduling-preemption-threshold",
    "0",
    "--max-running-requests",
    "4",
)
SETUPS = [
    Setup(f"colocated-priorities-{name}", (*LAPS, *EVERY_PAUSE, *BY_PRIORITY, *flags), mode="null")
    for name, flags in (("overlap", ()), ("normal", NORMAL_LOOP))
]
pytestmark = [pytest.mark.timeout(600), *on(*SETUPS)]


def test_streams_make_way_and_go_on_later(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    status = prefill.get("/laps_status")
    assert status["enabled"], status["reason"]

    said: list[str] = []

    def once(i: int) -> bool:
        asked = mixed(900 + 100 * i, 40, f"{prefill.setup.name}-{i}", 3.0)
        rng = random.Random(3)
        for a in asked:
            a.priority = rng.randint(0, 3)
        some_leave(asked, random.Random(2))
        asyncio.run(at_once(prefill, asked))
        must_be_right(asked, reference)
        prefill.all_tokens_are_free()
        after = prefill.get("/laps_status")
        assert after["in_progress"] == 0
        steps = after["decode"]["steps_in_pauses"] - status["decode"]["steps_in_pauses"]
        said.append(f"{steps} steps in pauses, {sum(a.retractions for a in asked)} streams made way")
        return steps > 0 and any(a.retractions for a in asked)

    until_seen(once, "a stream makes way", lambda: said)
