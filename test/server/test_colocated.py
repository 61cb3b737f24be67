"""Servers that prefill and decode, under load: decode steps and short batches run in pauses of long prompts, and every
token is the same as without load."""

from __future__ import annotations

import asyncio
import random

import http_load as load
import pytest
from rounds import until_seen
from served import Prefill, Reference, on

from .colocated import (
    COUNT,
    SETUPS,
    alone,
    at_once,
    mixed,
    must_be_as,
    must_be_right,
    some_leave,
    with_features,
)

pytestmark = [pytest.mark.timeout(600 + 5 * COUNT), *on(*SETUPS)]


def test_every_token_is_right_whatever_runs_in_the_pauses(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort; three of eight requests have penalties, a grammar or log-probabilities."""
    before = prefill.get("/laps_status")

    def once(i: int) -> bool:
        asked = mixed(100 * i + 1, COUNT, f"{prefill.setup.name}-{i}", COUNT / 12)
        rng = random.Random(2)
        some_leave(asked, rng)
        other = with_features(rng.sample(asked, 3 * COUNT // 8))
        asyncio.run(at_once(prefill, asked))
        after = prefill.get("/laps_status")
        assert after["enabled"], after["reason"]
        # Reported prefill time excludes the decode steps in pauses, which are reported separately.
        tbt = after["decode"]["tbt_ms"]
        assert tbt["p50"] <= tbt["p99"] <= tbt["longest"]
        busy_s = [s["decode"]["busy_s"] + sum(of["busy_s"] for of in s["totals"].values()) for s in (before, after)]
        assert 0.0 < busy_s[1] - busy_s[0] <= after["uptime_s"] - before["uptime_s"]
        must_be_right([a for a in asked if a not in other], reference)
        prefill.all_tokens_are_free()
        assert prefill.get("/laps_status")["in_progress"] == 0
        # The number depends on the load of the machine; two ranks must agree on each step and run fewer.
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        preempted = after["preemption"]["by_short_batches"] - before["preemption"]["by_short_batches"]
        if steps <= COUNT // 20 or not preempted:
            return False
        must_be_as(other, alone(prefill, other))
        prefill.all_tokens_are_free()
        return True

    until_seen(once, "steps and short batches run in pauses")


def test_a_pause_of_the_server_retracts_what_is_parked_too(prefill: Prefill, reference: Reference) -> None:
    asked = mixed(5, 12, f"pause-{prefill.setup.name}", 0.5)

    async def scenario() -> None:
        running = asyncio.ensure_future(at_once(prefill, asked))
        await asyncio.sleep(1.0)
        async with load.session() as http:
            async with http.post(prefill.server.url + "/pause_generation", json={"mode": "retract"}) as reply:
                assert reply.status == 200
            async with http.post(prefill.server.url + "/continue_generation", json={}) as reply:
                assert reply.status == 200
        await running

    asyncio.run(scenario())
    must_be_right(asked, reference)
    prefill.all_tokens_are_free()


def test_time_between_tokens_and_steps_in_pauses_are_among_the_metrics(prefill: Prefill) -> None:
    said: dict[str, float] = {}

    def once(i: int) -> bool:
        asyncio.run(at_once(prefill, mixed(7 + 100 * i, 6, f"metrics-{i}-{prefill.setup.name}", 0.2)))
        for line in prefill.get("/metrics").splitlines():
            if line.startswith("sglang:laps_"):
                name, _, value = line.removeprefix("sglang:laps_").partition("{")
                said[name] = float(value.split()[-1])
        return said["decode_steps_in_pauses_total"] > 0

    until_seen(once, "a step runs in a pause")
    for name in ("tbt_p50_seconds", "tbt_p99_seconds", "tbt_longest_seconds", "target_seconds", "step_seconds"):
        assert said[f"decode_{name}"] > 0.0, name
    assert 0 < said["decode_steps_in_pauses_total"] <= said["decode_steps_total"]
    assert said["decode_busy_s_total"] > 0.0
    assert {"decode_streams", "abandoned_passes_total", "busy_s_total"} <= said.keys()
