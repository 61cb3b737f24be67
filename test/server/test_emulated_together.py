"""A real server on an emulated device, on which rows cost as much as on a GPU: with deadlines, short prompts, a part of
a long prompt and streams share one step. The device computes no attention: a token depends only on the one before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rounds import until_seen
from served import Prefill, ids, on

from .colocated import Asked, alone, at_once, must_be_as
from .test_emulated_streams import ON_LAPS

pytestmark = [pytest.mark.timeout(600), *on(ON_LAPS)]
IN_TIME = {"custom_params": {"ttft_slo_ms": 1000}}
"""Sampling parameters with a near deadline: 7,000 tokens take more than a 16th of it."""


def counts(prefill: Prefill) -> tuple[int, int]:
    """Return the number of steps shared by both classes, and of decode steps that ran as rows."""
    status = prefill.get("/laps_status")
    return status["preemption"]["steps_shared"], status["decode"]["steps_carried"]


def test_with_deadlines_one_step_is_for_all(prefill: Prefill) -> None:
    def load(name: str, seed: int, sampling: dict[str, Any]) -> list[Asked]:
        streams = [Asked(f"{name}-stream-{i}", ids(seed + i, 50), 60, 0.0) for i in range(4)]
        longs = [Asked(f"{name}-long-{i}", ids(seed + 20 + i, 7000), 4, 0.5 + 0.2 * i) for i in range(2)]
        shorts = [Asked(f"{name}-{i}", ids(seed + 40 + i, 40 + i), 4, 0.5 + 0.1 * i) for i in range(20)]
        asked = [*streams, *longs, *shorts]
        for a in asked:
            a.sampling = sampling
        return asked

    def grown(asked: list[Asked]) -> tuple[int, int]:
        shared, carried = counts(prefill)
        asyncio.run(at_once(prefill, asked))
        must_be_as(asked, alone(prefill, asked, clients=1))
        prefill.all_tokens_are_free()
        after = counts(prefill)
        return after[0] - shared, after[1] - carried

    def once(i: int) -> bool:
        seed = 5000 + 2000 * i
        free = grown(load(f"free-{i}", seed, {}))
        due = grown(load(f"due-{i}", seed + 1000, IN_TIME))
        said.append(f"(shared, carried) steps {free} without deadlines, {due} with")
        return due[0] > 5 and due[0] > free[0] and due[1] > 5

    said: list[str] = []
    until_seen(once, "steps for all", lambda: said)
