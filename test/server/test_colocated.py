"""Servers that prefill and decode, under load: decode steps and short batches run in pauses of long prompts, and every
token is the same as without load."""

from __future__ import annotations

import asyncio
import json
import random

import http_load as load
import pytest
from rounds import repeat_until
from served import Prefill, Reference, random_prompt, run_on
from ties import TIE

from .colocated import (
    COUNT,
    SETUPS,
    abort_some,
    add_features,
    mixed_requests,
    require_equal_answers,
    require_right_answers,
    send_again,
    send_all_at_their_times,
)

pytestmark = [pytest.mark.timeout(600 + 5 * COUNT), *run_on(*SETUPS)]


def test_tokens_are_correct_with_steps_and_batches_in_pauses(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort; three of eight requests have penalties, a grammar or log-probabilities."""
    before = prefill.get("/laps_status")

    def attempt(i: int) -> bool:
        requests = mixed_requests(100 * i + 1, COUNT, f"{prefill.setup.name}-{i}", COUNT / 12)
        rng = random.Random(2)
        abort_some(requests, rng)
        other = add_features(rng.sample(requests, 3 * COUNT // 8))
        asyncio.run(send_all_at_their_times(prefill, requests))
        after = prefill.get("/laps_status")
        assert after["enabled"], after["reason"]
        # Reported prefill time excludes the decode steps in pauses, which are reported separately.
        tbt = after["decode"]["tbt_ms"]
        assert tbt["p50"] <= tbt["p99"] <= tbt["longest"]
        busy_s = [s["decode"]["busy_s"] + sum(of["busy_s"] for of in s["totals"].values()) for s in (before, after)]
        assert 0.0 < busy_s[1] - busy_s[0] <= after["uptime_s"] - before["uptime_s"]
        require_right_answers([a for a in requests if a not in other], reference)
        prefill.require_all_tokens_free()
        assert prefill.get("/laps_status")["in_progress"] == 0
        # The number depends on the load of the machine; two ranks must agree on each step and run fewer.
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        preempted = after["preemption"]["by_short_batches"] - before["preemption"]["by_short_batches"]
        if steps <= COUNT // 20 or not preempted:
            return False
        require_equal_answers(other, send_again(prefill, other))
        prefill.require_all_tokens_free()
        return True

    repeat_until(attempt, "steps and short batches run in pauses")


def test_tokens_are_correct_after_pause_generation_with_retract(prefill: Prefill, reference: Reference) -> None:
    def attempt(i: int) -> bool:
        requests = mixed_requests(5 + 100 * i, 12, f"pause-{i}-{prefill.setup.name}", 0.5)

        async def scenario() -> None:
            running = asyncio.ensure_future(send_all_at_their_times(prefill, requests))
            while not (any(a.tokens for a in requests) or running.done()):
                await asyncio.sleep(0.005)
            async with load.session() as http:
                async with http.post(prefill.server.url + "/pause_generation", json={"mode": "retract"}) as reply:
                    assert reply.status == 200
                async with http.post(prefill.server.url + "/continue_generation", json={}) as reply:
                    assert reply.status == 200
            await running

        asyncio.run(scenario())
        require_right_answers(requests, reference)
        prefill.require_all_tokens_free()
        return any(a.retractions for a in requests)

    repeat_until(attempt, "a request is retracted")


def test_each_of_several_samples_has_correct_tokens(prefill: Prefill, reference: Reference) -> None:
    """SGLang sends such a request to the scheduler once for the prefix cache, and then once for each sample."""
    sampling = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True, "n": 3}
    for length in (40, 2000):
        prompt = random_prompt(length, length)
        status, answer = prefill.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        assert status == 200, answer
        samples = json.loads(answer)
        assert [len(sample["output_ids"]) for sample in samples] == [4] * 3
        for sample in samples:
            assert reference.shortfall(prompt, sample["output_ids"]) <= TIE
    prefill.require_all_tokens_free()


def test_metrics_include_tbt_and_decode_steps_in_pauses(prefill: Prefill) -> None:
    said: dict[str, float] = {}

    def attempt(i: int) -> bool:
        asyncio.run(
            send_all_at_their_times(prefill, mixed_requests(7 + 100 * i, 6, f"metrics-{i}-{prefill.setup.name}", 0.2))
        )
        for line in prefill.get("/metrics").splitlines():
            if line.startswith("sglang:laps_"):
                name, _, value = line.removeprefix("sglang:laps_").partition("{")
                said[name] = float(value.split()[-1])
        return said["decode_steps_in_pauses_total"] > 0

    repeat_until(attempt, "a step runs in a pause")
    for name in ("tbt_p50_seconds", "tbt_p99_seconds", "tbt_longest_seconds", "target_seconds", "step_seconds"):
        assert said[f"decode_{name}"] > 0.0, name
    assert 0 < said["decode_steps_in_pauses_total"] <= said["decode_steps_total"]
    assert said["decode_busy_s_total"] > 0.0
    assert {"decode_streams", "abandoned_passes_total", "busy_s_total"} <= said.keys()
