"""Real servers that prefill and decode on an emulated device: decode steps take the profile's time, and streams
continue while a long prompt is prefilled."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import http_load as load
import pytest
from laps_core.latency.step import StepShape
from laps_emulate import spec
from laps_plan.profile import Profile
from rounds import repeat_until
from served import LAPS, Prefill, Setup, random_prompt, run_on

from benchmark.rig import devices, model

PROFILE, SLOW, TBT_MS = "h200-qwen3-8b", 8, 200.0
DEVICE = f"{PROFILE},slow={SLOW}"
ARGS = ("--chunked-prefill-size", "8192", "--max-total-tokens", "65536", "--max-running-requests", "64")
KNOBS = ("--laps-config", json.dumps({**devices.emulated(DEVICE).laps, "tbt_ms": TBT_MS}))
ON_LAPS = Setup("emulated-streams", (*LAPS, *ARGS, *KNOBS, spec.FLAG, DEVICE), shape=model.EMULATED, mode="null")
ON_STOCK = Setup("emulated-streams-stock", ARGS, {spec.ENV: DEVICE}, model.EMULATED, mode="null")
STREAMS, TOKENS, LONG = 4, 60, 8000
SLOWER = 1.5
"""Largest factor by which a busy machine may prolong a step."""

pytestmark = run_on(ON_LAPS, ON_STOCK)


def device_report(prefill: Prefill) -> dict[str, Any]:
    """Return the server's report on its device."""
    return dict(prefill.get("/server_info")["internal_states"][0]["emulated"])


async def stream(http: Any, prefill: Prefill, prompt: list[int], new: int) -> list[float]:
    """Return the arrival time of each token of an answer (seconds)."""
    came: list[float] = []
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "stream": True, "sampling_params": sampling}
    async with http.post(prefill.server.url + "/generate", json=body) as reply:
        assert reply.status == 200
        async for line in reply.content:
            if line.startswith(b"data: {"):
                count = len(json.loads(line[6:])["output_ids"])
                came += [time.perf_counter()] * (count - len(came))
    return came


@pytest.mark.timeout(600)
def test_decode_follows_profile_and_only_laps_streams_during_prefill(prefill: Prefill) -> None:
    profile = Profile.load(PROFILE)
    step_s = SLOW * profile.decode_s(STREAMS, 100 * STREAMS)
    prompt_s = SLOW * profile.coefficients.seconds(StepShape.of([(LONG, 0)]))
    said: list[str] = []
    seen: set[str] = set()

    async def scenario(seed: int) -> tuple[list[list[float]], float, float]:
        async with load.session() as http:
            prompts = [random_prompt(seed + i, 50) for i in range(STREAMS)]
            streams = [asyncio.ensure_future(stream(http, prefill, p, TOKENS)) for p in prompts]
            await asyncio.sleep(1.0)
            begin = time.perf_counter()
            long = await stream(http, prefill, random_prompt(seed + 99, LONG), 2)
            return list(await asyncio.gather(*streams)), begin, long[0]

    def attempt(i: int) -> bool:
        streams, begin, first = asyncio.run(scenario(1000 * i))
        assert [len(came) for came in streams] == [TOKENS] * STREAMS
        assert first - begin >= prompt_s
        each = sorted(b - a for came in streams for a, b in pairwise(came))
        # Count tokens in the middle of the prompt's time: on a busy machine prompt and tokens can be late.
        beside = sum(first - 0.75 * prompt_s < at < first - 0.25 * prompt_s for at in streams[0])
        status = device_report(prefill)["decode"]
        assert status["steps"] >= TOKENS - 1
        lasted = status["lasted_over_profile"]["median"]
        assert lasted > 0.99
        said.append(
            f"{beside} tokens in half of {prompt_s:.2f} s, {streams[0][-1] - begin:.2f} s of stream, {lasted:.2f} of "
            f"the profile, {each[len(each) // 2]:.3f} s for {step_s:.3f}"
        )
        # A busy machine can hide one of these in each round.
        events = {
            "streams": beside >= 0.25 * prompt_s / (TBT_MS / 1e3) if prefill.laps else beside <= 1,
            "in time": 0.9 * step_s < each[len(each) // 2] < SLOWER * step_s + TBT_MS / 1e3,
            "as the profile": lasted < SLOWER,
        }
        seen.update(event for event, happened in events.items() if happened)
        return seen == events.keys()

    repeat_until(attempt, "streams have their steps", lambda: said)
