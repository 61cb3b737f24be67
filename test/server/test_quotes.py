"""Real servers quote their requests, answer queries for quotes, and replay their recorded requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import http_load as load
import pytest
from rounds import until_seen
from served import Prefill, ids, on

from .slicing import ask, post
from .test_emulated import LONG, ON_LAPS, SHORT

pytestmark = on(ON_LAPS)
KINDS = (SHORT, 4 * SHORT, LONG // 8, LONG // 4)


def serve(prefill: Prefill, seed: int) -> None:
    """Send requests of all lengths."""

    async def scenario() -> None:
        async with load.session() as http:
            for i in range(6):
                sent = [post(http, prefill, ask(ids(seed + 10 * i + j, n))) for j, n in enumerate(KINDS)]
                assert [status for status, *_ in await asyncio.gather(*sent)] == [200] * len(sent)

    asyncio.run(scenario())


def outcomes(prefill: Prefill) -> int:
    quotes = prefill.get("/laps_status")["quotes"]
    return sum(sum(sides.values()) for sides in quotes["outcomes"].values())


def quoted(prefill: Prefill) -> None:
    """Send requests until the server knows its step times."""

    def once(i: int) -> bool:
        serve(prefill, 70_000 + 1000 * i)
        return prefill.get("/laps_status")["quote"] is not None

    until_seen(once, "the latency model is fitted")


def test_every_request_is_quoted_and_compared(prefill: Prefill) -> None:
    quoted(prefill)
    before = outcomes(prefill)
    serve(prefill, 90_000)
    assert outcomes(prefill) == before + 6 * len(KINDS)
    metrics = prefill.get("/metrics")
    for name in ("quote_seconds", "quote_high_seconds", "quote_outcomes_total", "quote_beyond_bound_total"):
        assert f"sglang:laps_{name}" in metrics


def test_the_server_says_what_a_request_would_wait(prefill: Prefill) -> None:
    quoted(prefill)
    one = prefill.get(f"/laps_quote?new={LONG}&cached=0&max_age_s=5")
    assert one["class"] == "long"
    assert 0.0 < one["low_ms"] <= one["ttft_ms"] <= one["high_ms"] <= one["bound_ms"]
    status, text = prefill.post_text("/laps_quote", json.dumps([{"new": LONG}, {"new": SHORT, "cached": LONG}]))
    assert status == 200
    both: Any = json.loads(text)["quotes"]
    assert [q["class"] for q in both] == ["long", "short"]
    assert prefill.post_text("/laps_quote", "{}")[0] == 400


def test_the_server_replays_what_it_had(prefill: Prefill) -> None:
    quoted(prefill)
    code, text = prefill.post_text("/laps_replay", json.dumps({"seconds": 600}))
    if "laps_receipts" in text and "404" in text:
        pytest.skip("this server keeps no receipts")
    assert code == 200, text
    told = json.loads(text)
    assert {"measured", "fcfs", "here"} <= {p["name"] for p in told["policies"]}
    assert len(told["requests"]) >= 10
    assert prefill.post("/laps_replay", {"seconds": 0})[0] == 400
