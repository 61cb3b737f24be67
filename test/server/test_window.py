"""The waiting window and deadlines on a real prefill server; all assertions hold at any speed of the machine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import http_load as load
import pytest
from rounds import until_seen
from served import CHUNK, LAPS, Prefill, Setup, ask, ids, on, send_all

from benchmark.load.prompts import FAKE_BOOTSTRAP_HOST

FIXED = Setup(
    "fixed-window", (*LAPS, "--laps-wait-window-ms", "500", "--laps-config", '{"window": "fixed", "profile": true}')
)
pytestmark = on(FIXED)


def window(prefill: Prefill) -> dict[str, Any]:
    return dict(prefill.get("/laps_status")["window"])


def test_a_burst_of_a_full_batch_leaves_as_one(prefill: Prefill) -> None:
    def once(i: int) -> bool:
        """Return True if the whole burst arrived within one window."""
        before, dispatched = prefill.totals()["short"], window(prefill)["dispatched"]
        asyncio.run(send_all(prefill, [ids(1000 * i + k, 20) for k in range(8)]))
        after = prefill.totals()["short"]
        assert after["requests"] - before["requests"] == 8
        full = window(prefill)["dispatched"]["depth"] - dispatched["depth"]
        assert full <= 1
        return (after["batches"] - before["batches"], full) == (1, 1)

    until_seen(once, "a full batch leaves as one")


def lone_one_waits_for_its_window(prefill: Prefill, seed: int) -> bool:
    """Return True if a lone request is held for a window, and no longer."""
    before = window(prefill)
    assert len(asyncio.run(send_all(prefill, [ids(seed, 20)]))) == 1
    after = window(prefill)
    assert sum(after["waits_ms"].values()) - sum(before["waits_ms"].values()) == 1
    return bool(after["dispatched"]["window"] - before["dispatched"]["window"] == 1)


def test_a_window_ends_without_a_further_arrival(prefill: Prefill) -> None:
    until_seen(lambda i: lone_one_waits_for_its_window(prefill, 9 + 1000 * i), "a window ends by itself")


def test_a_hold_ends_with_an_abort(prefill: Prefill) -> None:
    async def scenario(rid: str) -> bool:
        """Return True if a request was aborted while it was held."""
        async with load.session() as http:
            held = asyncio.ensure_future(http.post(prefill.server.url + "/generate", json=ask(3, ids(32, 20), rid)))
            while not held.done() and not prefill.get("/laps_status")["queues"]["short"]["depth"]:
                await asyncio.sleep(0.005)
            prefill.post("/abort_request", {"rid": rid})
            answer = await (await held).json()
        await asyncio.sleep(2.5)  # longer than a batch may be held
        return bool(answer["meta_info"]["finish_reason"]["type"] == "abort") if "meta_info" in answer else True

    def once(i: int) -> bool:
        aborted = asyncio.run(scenario(f"held-and-aborted-{i}-x"))
        return lone_one_waits_for_its_window(prefill, 33 + 1000 * i) and aborted

    until_seen(once, "a later request begins a hold of its own")


def test_long_work_is_not_held_up_by_the_window(prefill: Prefill) -> None:
    prompts = [ids(10, 3 * CHUNK), *(ids(20 + i, 30) for i in range(4))]
    assert len(asyncio.run(send_all(prefill, prompts))) == 5


def test_a_deadline_cuts_the_wait(prefill: Prefill) -> None:
    before = window(prefill)["dispatched"]
    body = ask(1, ids(30, 20))
    body["sampling_params"]["custom_params"] = {"ttft_slo_ms": 300}
    assert prefill.post("/generate", body)[0] == 200
    after = window(prefill)["dispatched"]
    # Without the deadline the hold would last 500 ms; the deadline ends it even if it can no longer be met.
    assert after["window"] == before["window"]
    slo = prefill.get("/laps_status")["slo"]["classes"]["short"]
    assert slo["met"] + slo["missed"] == 1


@pytest.mark.parametrize("value", [-5, 0, "soon", True, [1], 5e-324, 1e-310, 1e-9, 0.09, 1e10, 10**30])
def test_a_bad_deadline_is_a_bad_request(prefill: Prefill, value: Any) -> None:
    body = ask(2, ids(31, 20))
    body["sampling_params"]["custom_params"] = {"ttft_slo_ms": value}
    status, text = prefill.post("/generate", body)
    assert status == 400
    assert "sampling_params.custom_params.ttft_slo_ms" in text


@pytest.mark.parametrize("number", ["1" + 400 * "0", "1e400", "NaN", "Infinity", "1" + 5000 * "0"])
def test_a_number_that_no_float_holds_is_a_bad_request(prefill: Prefill, number: str) -> None:
    body = json.dumps({**ask(2, ids(32, 20)), "sampling_params": {"custom_params": {"ttft_slo_ms": "NUMBER"}}})
    assert 400 <= prefill.post_text("/generate", body.replace('"NUMBER"', number))[0] < 500


def test_one_bad_deadline_in_a_batch_is_a_bad_request_and_a_short_one_is_only_late(prefill: Prefill) -> None:
    def batch(*deadlines: float) -> dict[str, Any]:
        n = len(deadlines)
        return {
            "input_ids": [ids(33 + i, 20) for i in range(n)],
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


def test_deadlines_under_load_are_counted_and_nobody_is_dropped(prefill: Prefill) -> None:
    async def one(http: Any, i: int) -> None:
        prompt = ids(100 + i, 2 * CHUNK if i % 8 == 0 else 40)
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


def test_the_profile_has_fitted_the_latency_model(prefill: Prefill) -> None:
    model = prefill.get("/laps_status")["latency_model"]
    assert model["fitted"] is True
    assert model["boundary_source"] == "knee"
    assert model["error"]["samples"] > 0
    json.dumps(model)
