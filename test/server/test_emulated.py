"""Real servers on an emulated device, LAPS and stock: they keep the time of the profile, and say what they are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import http_load as load
import pytest
from laps_core.latency.model import StepShape
from laps_emulate import spec
from laps_plan.profile import Profile
from served import LAPS, NORMAL_LOOP, Prefill, Setup, ids, on

from benchmark.rig import model

from .slicing import ask, post, until_slices_run

PROFILE, SLOW = "h200-qwen3-8b", 4
DEVICE = f"{PROFILE},slow={SLOW}"
ARGS = ("--chunked-prefill-size", "8192")
SLICED = ("--laps-config", json.dumps({"slice_ms": 4.0 * SLOW}))
ON_LAPS = Setup("emulated-laps", (*LAPS, *ARGS, *SLICED, spec.FLAG, DEVICE), shape=model.EMULATED)
ON_STOCK = Setup("emulated-stock", (*ARGS, *NORMAL_LOOP), {spec.ENV: DEVICE}, model.EMULATED)
LONG, SHORT = 8000, 60
HOST_S = 1.0
"""More than the host takes beside a step, on a busy machine."""

pytestmark = on(ON_LAPS, ON_STOCK)


def device_s(tokens: int) -> float:
    """Return what a prompt of `tokens` takes alone."""
    return SLOW * Profile.load(PROFILE).coefficients.seconds(StepShape.of([(tokens, 0)]))


def told(prefill: Prefill) -> dict[str, Any]:
    """Return what the server says of its device."""
    state = prefill.get("/server_info")["internal_states"][0]
    if prefill.laps:
        status = prefill.get("/laps_status")
        assert status["emulated"]["profile"] == state["laps"]["emulated"]["profile"] == PROFILE
    return dict(state["emulated"])


@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_a_lone_prompt_takes_what_the_profile_says(prefill: Prefill, tokens: int) -> None:
    async def scenario() -> float:
        async with load.session() as http:
            begin = asyncio.get_running_loop().time()
            status, answer, _ = await post(http, prefill, ask(ids(tokens, tokens)))
            assert status == 200, answer
            return asyncio.get_running_loop().time() - begin

    before = told(prefill)["steps"]
    took_s = asyncio.run(scenario())
    assert device_s(tokens) <= took_s <= device_s(tokens) + HOST_S
    assert told(prefill)["steps"] == before + 1


def test_only_laps_answers_a_short_prompt_amid_a_long_one(prefill: Prefill) -> None:
    async def scenario() -> tuple[float, float]:
        async with load.session() as http:
            long = asyncio.ensure_future(post(http, prefill, ask(ids(1, LONG))))
            if prefill.laps:
                await until_slices_run(http, prefill, long)
            else:
                await asyncio.sleep(0.2 * device_s(LONG))
            short = await post(http, prefill, ask(ids(2, SHORT)))
            assert short[0] == 200
            return short[2], (await long)[2]

    short_s, long_s = asyncio.run(scenario())
    assert (short_s < long_s) is prefill.laps


def test_it_cannot_be_taken_for_a_device(prefill: Prefill) -> None:
    status = told(prefill)
    assert (status["profile"], status["slow"]) == (PROFILE, SLOW)
    assert status["source"] == Profile.load(PROFILE).source
    assert 0.99 < status["lasted_over_profile"]["median"] < 1.3, "a busy host is late between slices"
    assert 0.0 < status["host_share"] < 1.0
    log = prefill.server.log.read_text(errors="replace")
    lines = [line for line in log.splitlines() if "EMULATED DEVICE" in line]
    assert len(lines) == 2, "the launcher's and the scheduler's"
    assert all(spec.DeviceSpec.parse(DEVICE).warning() in line for line in lines)
    assert log.index("EMULATED DEVICE") < log.index("server_args=")
    if prefill.laps:
        assert f'profile="{PROFILE}",slow="{SLOW}"' in prefill.get("/metrics")
