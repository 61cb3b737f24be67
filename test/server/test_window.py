"""The waiting window and deadlines on a real prefill server; all assertions hold at any speed of the machine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import CHUNK, LAPS, Prefill, Setup, random_prompt, request_body, run_on, send_all

from benchmark.load.prompts import FAKE_BOOTSTRAP_HOST

FIXED = Setup(
    "fixed-window", (*LAPS, "--laps-wait-window-ms", "500", "--laps-config", '{"window": "fixed", "profile": true}')
)
pytestmark = run_on(FIXED)


def window(prefill: Prefill) -> dict[str, Any]:
    return dict(prefill.get("/laps_status")["window"])


def test_burst_of_full_batch_size_runs_in_one_batch(prefill: Prefill) -> None:
    def attempt(i: int) -> bool:
        """Return True if the whole burst arrived within one window."""
        before, dispatched = prefill.totals()["short"], window(prefill)["dispatched"]
        asyncio.run(send_all(prefill, [random_prompt(1000 * i + k, 20) for k in range(8)]))
        after = prefill.totals()["short"]
        assert after["requests"] - before["requests"] == 8
        full = window(prefill)["dispatched"]["depth"] - dispatched["depth"]
        assert full <= 1
        return (after["batches"] - before["batches"], full) == (1, 1)

    repeat_until(attempt, "a full batch leaves as one")


def lone_prompt_waits_for_window(prefill: Prefill, seed: int) -> bool:
    """Return True if a lone request is held for a window, and no longer."""
    before = window(prefill)
    assert len(asyncio.run(send_all(prefill, [random_prompt(seed, 20)]))) == 1
    after = window(prefill)
    assert sum(after["waits_ms"].values()) - sum(before["waits_ms"].values()) == 1
    return bool(after["dispatched"]["window"] - before["dispatched"]["window"] == 1)


def test_window_ends_without_further_arrival(prefill: Prefill) -> None:
    repeat_until(lambda i: lone_prompt_waits_for_window(prefill, 9 + 1000 * i), "a window ends by itself")


def test_abort_of_held_request_ends_hold(prefill: Prefill) -> None:
    async def scenario(rid: str) -> bool:
        """Return True if a request was aborted while it was held."""
        async with load.session() as http:
            held = asyncio.ensure_future(
                http.post(prefill.server.url + "/generate", json=request_body(3, random_prompt(32, 20), rid))
            )
            while not held.done() and not prefill.get("/laps_status")["queues"]["short"]["depth"]:
                await asyncio.sleep(0.005)
            prefill.post("/abort_request", {"rid": rid})
            answer = await (await held).json()
        await asyncio.sleep(2.5)  # longer than a batch may be held
        return bool(answer["meta_info"]["finish_reason"]["type"] == "abort") if "meta_info" in answer else True

    def attempt(i: int) -> bool:
        aborted = asyncio.run(scenario(f"held-and-aborted-{i}-x"))
        return lone_prompt_waits_for_window(prefill, 33 + 1000 * i) and aborted

    repeat_until(attempt, "a later request begins a hold of its own")


def test_long_and_short_prompts_are_answered_with_fixed_window(prefill: Prefill) -> None:
    prompts = [random_prompt(10, 3 * CHUNK), *(random_prompt(20 + i, 30) for i in range(4))]
    assert len(asyncio.run(send_all(prefill, prompts))) == 5


def test_long_prompt_is_not_held(prefill: Prefill) -> None:
    before, batches = window(prefill), prefill.totals()["long"]["batches"]
    assert len(asyncio.run(send_all(prefill, [random_prompt(11, 3 * CHUNK)]))) == 1
    after = window(prefill)
    assert after["waits_ms"] == before["waits_ms"]
    assert after["dispatched"]["window"] == before["dispatched"]["window"]
    assert prefill.totals()["long"]["batches"] - batches == 3


def test_deadline_ends_hold_before_window(prefill: Prefill) -> None:
    def due() -> int:
        slo = prefill.get("/laps_status")["slo"]["classes"].get("short", {})
        return int(slo.get("met", 0) + slo.get("missed", 0))

    def attempt(i: int) -> bool:
        """Return True if no hold lasted for a whole window."""
        before, due_before = window(prefill)["dispatched"], due()
        body = request_body(1 + 1000 * i, random_prompt(30 + 1000 * i, 20))
        body["sampling_params"]["custom_params"] = {"ttft_slo_ms": 300}
        assert prefill.post("/generate", body)[0] == 200
        assert due() - due_before == 1
        return bool(window(prefill)["dispatched"]["window"] == before["window"])

    # Without the deadline the hold would last 500 ms. A busy machine may look at the request too late.
    repeat_until(attempt, "a deadline ends a hold")


@pytest.mark.parametrize("value", [-5, 0, "soon", True, [1], 5e-324, 1e-310, 1e-9, 0.09, 1e10, 10**30])
def test_invalid_deadline_returns_400(prefill: Prefill, value: Any) -> None:
    body = request_body(2, random_prompt(31, 20))
    body["sampling_params"]["custom_params"] = {"ttft_slo_ms": value}
    status, text = prefill.post("/generate", body)
    assert status == 400
    assert "sampling_params.custom_params.ttft_slo_ms" in text


@pytest.mark.parametrize("number", ["1" + 400 * "0", "1e400", "NaN", "Infinity", "1" + 5000 * "0"])
def test_non_finite_deadline_returns_client_error(prefill: Prefill, number: str) -> None:
    body = json.dumps(
        {**request_body(2, random_prompt(32, 20)), "sampling_params": {"custom_params": {"ttft_slo_ms": "NUMBER"}}}
    )
    assert 400 <= prefill.post_text("/generate", body.replace('"NUMBER"', number))[0] < 500


def test_batch_is_refused_for_invalid_but_not_short_deadline(prefill: Prefill) -> None:
    def batch(*deadlines: float) -> dict[str, Any]:
        n = len(deadlines)
        return {
            "input_ids": [random_prompt(33 + i, 20) for i in range(n)],
            "sampling_params": [
                {"max_new_tokens": 1, "temperature": 0, "custom_params": {"ttft_slo_ms": d}} for d in deadlines
            ],
            "bootstrap_host": [FAKE_BOOTSTRAP_HOST] * n,
            "bootstrap_port": [1] * n,
            "bootstrap_room": [100 + i for i in range(n)],
        }

    status, text = prefill.post("/generate", batch(400.0, 5e-324, 400.0))
    assert (status, "ttft_slo_ms" in text) == (400, True)
    status, text = prefill.post("/generate", batch(0.1, 0.1, 1e9))
    assert (status, len(json.loads(text))) == (200, 3)
    assert 0.0 < prefill.get("/laps_status")["load"]["slo_deviation"] <= 4.0


def test_deadlines_are_counted_and_no_request_is_dropped(prefill: Prefill) -> None:
    async def one(http: Any, i: int) -> None:
        prompt = random_prompt(100 + i, 2 * CHUNK if i % 8 == 0 else 40)
        slo = {"ttft_slo_ms": 1 if i % 4 == 1 else 60_000}
        seen = await load.prefill_only(http, prefill.server.url, prompt, "x", 0.0, custom_params=slo)
        assert seen.error is None

    async def run() -> None:
        async with load.session() as http:
            await asyncio.gather(*(one(http, i) for i in range(40)))

    def counts() -> tuple[int, int]:
        classes = prefill.get("/laps_status")["slo"]["classes"].values()
        return sum(c["met"] for c in classes), sum(c["missed"] for c in classes)

    met, missed = counts()
    asyncio.run(run())
    assert (counts()[0] - met, counts()[1] - missed) == (30, 10)


def test_profile_fits_latency_model(prefill: Prefill) -> None:
    model = prefill.get("/laps_status")["latency_model"]
    assert model["fitted"] is True
    assert model["boundary_source"] == "knee"
    assert model["error"]["samples"] > 0
    json.dumps(model)
