"""Real servers on an emulated device, LAPS and stock: steps take the profile's time, and status marks the emulation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import http_load as load
import pytest
from laps_core.latency.step import StepShape
from laps_emulate import spec
from laps_plan.profile import Profile
from rounds import repeat_until
from served import LAPS, NORMAL_LOOP, Prefill, Setup, random_prompt, run_on

from benchmark.rig import model

from .slicing import arrived_during, post, request_body, wait_until_slices_run

PROFILE, SLOW = "h200-qwen3-8b", 4
DEVICE = f"{PROFILE},slow={SLOW}"
ARGS = ("--chunked-prefill-size", "8192")
SLICED = ("--laps-config", json.dumps({"slice_ms": 4.0 * SLOW}))
ON_LAPS = Setup("emulated-laps", (*LAPS, *ARGS, *SLICED, spec.FLAG, DEVICE), shape=model.EMULATED)
ON_STOCK = Setup("emulated-stock", (*ARGS, *NORMAL_LOOP), {spec.ENV: DEVICE}, model.EMULATED)
LONG, SHORT = 8000, 60
HOST_S = 1.0
"""Upper bound of the host's time beyond a step (seconds), in the first round."""

pytestmark = run_on(ON_LAPS, ON_STOCK)


def device_s(tokens: int) -> float:
    """Return the device time of a lone prompt of `tokens` (seconds)."""
    return SLOW * Profile.load(PROFILE).coefficients.seconds(StepShape.of([(tokens, 0)]))


def device_report(prefill: Prefill) -> dict[str, Any]:
    """Return the server's report on its device."""
    state = prefill.get("/server_info")["internal_states"][0]
    if prefill.laps:
        status = prefill.get("/laps_status")
        assert status["emulated"]["profile"] == state["laps"]["emulated"]["profile"] == PROFILE
    return dict(state["emulated"])


@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_lone_prompt_takes_profile_time(prefill: Prefill, tokens: int) -> None:
    async def scenario(seed: int) -> float:
        async with load.session() as http:
            begin = asyncio.get_running_loop().time()
            status, answer, _ = await post(http, prefill, request_body(random_prompt(seed, tokens)))
            assert status == 200, answer
            return asyncio.get_running_loop().time() - begin

    def attempt(i: int) -> bool:
        before = device_report(prefill)["steps"]
        took_s = asyncio.run(scenario(tokens + 10_000 * i))
        assert took_s >= device_s(tokens)
        assert device_report(prefill)["steps"] == before + 1
        return took_s <= device_s(tokens) + HOST_S * (1 + i)

    repeat_until(attempt, "the host takes little beside a step")


def test_only_laps_answers_short_prompt_before_running_long_prompt(prefill: Prefill) -> None:
    async def scenario(i: int) -> tuple[Any, Any]:
        async with load.session() as http:
            long = asyncio.ensure_future(post(http, prefill, request_body(random_prompt(1 + 1000 * i, LONG))))
            if prefill.laps:
                await wait_until_slices_run(http, prefill, long)
            else:
                await asyncio.sleep(0.2 * device_s(LONG))
            short = await post(http, prefill, request_body(random_prompt(2 + 1000 * i, SHORT)))
            assert short[0] == 200
            return short, await long

    def attempt(i: int) -> bool:
        short, long = asyncio.run(scenario(i))
        if not arrived_during(short[1], long[1]):
            return False
        assert prefill.laps or short[2] >= long[2]
        return not prefill.laps or short[2] < long[2]

    repeat_until(attempt, "a short prompt comes amid a long one")


def test_emulation_is_marked_in_status_log_and_metrics(prefill: Prefill) -> None:
    async def send(seed: int, count: int) -> None:
        async with load.session() as http:
            for i in range(count):
                assert (await post(http, prefill, request_body(random_prompt(seed + i, LONG // 4))))[0] == 200

    def attempt(i: int) -> bool:
        """Return True if steps took the profile's time; a busy host is late between slices. The median covers all steps
        since the start, so later rounds have more of them."""
        asyncio.run(send(500_000 + 1000 * i, 3 * 2**i))
        status = device_report(prefill)
        assert (status["profile"], status["slow"]) == (PROFILE, SLOW)
        assert status["source"] == Profile.load(PROFILE).source
        assert 0.0 < status["host_share"] < 1.0
        assert status["lasted_over_profile"]["median"] > 0.99
        return bool(status["lasted_over_profile"]["median"] < 1.3)

    repeat_until(attempt, "steps last as long as the profile says", lambda: device_report(prefill))
    log = prefill.server.log.read_text(errors="replace")
    lines = [line for line in log.splitlines() if "EMULATED DEVICE" in line]
    assert len(lines) == 2, "the launcher's and the scheduler's"
    assert all(spec.DeviceSpec.parse(DEVICE).warning() in line for line in lines)
    assert log.index("EMULATED DEVICE") < log.index("server_args=")
    if prefill.laps:
        assert f'profile="{PROFILE}",slow="{SLOW}"' in prefill.get("/metrics")
