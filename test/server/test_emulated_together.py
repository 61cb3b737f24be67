"""Real servers on emulated devices, on which rows cost as much as on a GPU: with deadlines, short prompts, a part of a
long prompt and streams share one step; without short prompts, parts of long prompts carry the streams. The devices
compute no attention: a token depends only on the one before."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from laps_emulate import spec
from rounds import repeat_until
from served import LAPS, Prefill, Setup, random_prompt, run_on

from benchmark.rig import devices, model

from .colocated import Request, require_equal_answers, send_again, send_all_at_their_times
from .test_emulated_streams import ARGS, ON_LAPS

DENSE = "h200-qwen3-32b,slow=2"
KNOBS = ("--laps-config", json.dumps(devices.emulated(DENSE).laps))
ON_DENSE = Setup("emulated-dense", (*LAPS, *ARGS, *KNOBS, spec.FLAG, DENSE), shape=model.EMULATED, mode="null")
pytestmark = [pytest.mark.timeout(1500), run_on(ON_LAPS)[1]]
IN_TIME = {"custom_params": {"ttft_slo_ms": 1000}}
"""Sampling parameters with a near deadline: 7,000 tokens take more than a 16th of it."""


def counts(prefill: Prefill) -> tuple[int, int]:
    """Return the number of steps shared by both classes, and of decode steps that ran as rows."""
    status = prefill.get("/laps_status")
    return status["preemption"]["steps_shared"], status["decode"]["steps_carried"]


@run_on(ON_DENSE)[0]
def test_parts_of_long_prompts_carry_streams_without_short_prompts(prefill: Prefill) -> None:
    """Few short prompts: only the streams, which start first."""

    def attempt(i: int) -> bool:
        seed = 9000 + 100 * i
        streams = [Request(f"d{i}-stream-{n}", random_prompt(seed + n, 300), 40, 0.0) for n in range(4)]
        longs = [Request(f"d{i}-long-{n}", random_prompt(seed + 20 + n, 4000), 4, 1.0 + 0.1 * n) for n in range(4)]
        before = prefill.get("/laps_status")["decode"]
        asyncio.run(send_all_at_their_times(prefill, [*streams, *longs]))
        require_equal_answers([*streams, *longs], send_again(prefill, [*streams, *longs], clients=1))
        prefill.require_all_tokens_free()
        after = prefill.get("/laps_status")["decode"]
        said.append(f"{ {key: after[key] - before[key] for key in ('steps', 'steps_in_pauses', 'steps_carried')} }")
        return after["steps_carried"] - before["steps_carried"] > 5

    said: list[str] = []
    repeat_until(attempt, "parts that carry streams", lambda: said)


@run_on(ON_LAPS)[0]
def test_deadlines_make_classes_and_streams_share_steps(prefill: Prefill) -> None:
    def load(name: str, seed: int, sampling: dict[str, Any]) -> list[Request]:
        streams = [Request(f"{name}-stream-{i}", random_prompt(seed + i, 50), 60, 0.0) for i in range(4)]
        longs = [Request(f"{name}-long-{i}", random_prompt(seed + 20 + i, 7000), 4, 0.5 + 0.2 * i) for i in range(2)]
        shorts = [Request(f"{name}-{i}", random_prompt(seed + 40 + i, 40 + i), 4, 0.5 + 0.1 * i) for i in range(20)]
        requests = [*streams, *longs, *shorts]
        for a in requests:
            a.sampling = sampling
        return requests

    def grown(requests: list[Request]) -> tuple[int, int]:
        shared, carried = counts(prefill)
        asyncio.run(send_all_at_their_times(prefill, requests))
        require_equal_answers(requests, send_again(prefill, requests, clients=1))
        prefill.require_all_tokens_free()
        after = counts(prefill)
        return after[0] - shared, after[1] - carried

    def attempt(i: int) -> bool:
        seed = 5000 + 2000 * i
        free = grown(load(f"free-{i}", seed, {}))
        due = grown(load(f"due-{i}", seed + 1000, IN_TIME))
        said.append(f"(shared, carried) steps {free} without deadlines, {due} with")
        return due[0] > 5 and due[0] > free[0] and due[1] > 5

    said: list[str] = []
    repeat_until(attempt, "steps for all", lambda: said)
