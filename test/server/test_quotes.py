"""Real servers quote their requests, answer queries for quotes, and replay their recorded requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import Prefill, random_prompt, run_on

from .slicing import post, request_body
from .test_emulated import LONG, ON_LAPS, SHORT

pytestmark = run_on(ON_LAPS)
KINDS = (SHORT, 4 * SHORT, LONG // 8, LONG // 4)


def serve(prefill: Prefill, seed: int) -> None:
    """Send requests of all lengths."""

    async def scenario() -> None:
        async with load.session() as http:
            for i in range(6):
                sent = [
                    post(http, prefill, request_body(random_prompt(seed + 10 * i + j, n))) for j, n in enumerate(KINDS)
                ]
                assert [status for status, *_ in await asyncio.gather(*sent)] == [200] * len(sent)

    asyncio.run(scenario())


def outcomes(prefill: Prefill) -> int:
    quotes = prefill.get("/laps_status")["quotes"]
    return sum(sum(sides.values()) for sides in quotes["outcomes"].values())


def quoted(prefill: Prefill) -> None:
    """Send requests until the server knows its step times."""

    def attempt(i: int) -> bool:
        serve(prefill, 70_000 + 1000 * i)
        return prefill.get("/laps_status")["quote"] is not None

    repeat_until(attempt, "the latency model is fitted")


def test_every_request_has_quote_and_counted_outcome(prefill: Prefill) -> None:
    quoted(prefill)
    before = outcomes(prefill)
    serve(prefill, 90_000)
    assert outcomes(prefill) == before + 6 * len(KINDS)
    metrics = prefill.get("/metrics")
    for name in ("quote_seconds", "quote_high_seconds", "quote_outcomes_total", "quote_beyond_bound_total"):
        assert f"sglang:laps_{name}" in metrics


def test_quote_route_predicts_ttft(prefill: Prefill) -> None:
    quoted(prefill)
    one = prefill.get(f"/laps_quote?new={LONG}&cached=0&max_age_s=5")
    assert one["class"] == "long"
    assert 0.0 < one["low_ms"] <= one["ttft_ms"] <= one["high_ms"] <= one["bound_ms"]
    status, text = prefill.post_text("/laps_quote", json.dumps([{"new": LONG}, {"new": SHORT, "cached": LONG}]))
    assert status == 200
    both: Any = json.loads(text)["quotes"]
    assert [q["class"] for q in both] == ["long", "short"]
    assert prefill.post_text("/laps_quote", "{}")[0] == 400


def test_replay_route_reports_policies_and_requests(prefill: Prefill) -> None:
    quoted(prefill)
    code, text = prefill.post_text("/laps_replay", json.dumps({"seconds": 600}))
    if "laps_receipts" in text and "404" in text:
        pytest.skip("this server keeps no receipts")
    assert code == 200, text
    told = json.loads(text)
    assert {"measured", "fcfs", "here"} <= {p["name"] for p in told["policies"]}
    assert len(told["requests"]) >= 10
    assert prefill.post("/laps_replay", {"seconds": 0})[0] == 400
