"""Receipts through the router: receipts of prefill servers plus the time that requests spend elsewhere."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from laps_core.receipts.receipt import RECEIPT_HEADER

from .fakes import SHORT, stack

SERVER = {"class": "short", "arrived_s": 1.0, "ttft_ms": 10.0, "causes": {"computing": 7.0, "answering": 3.0},
          "behind": []}  # fmt: skip
ASKS = {RECEIPT_HEADER: "1"}
ROUTES = [("generate", {"text": SHORT}), ("v1/completions", {"prompt": SHORT})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_receipt_header_returns_receipt_of_prefill_server(route: str, body: Any, stream: bool) -> None:
    async def run() -> None:
        async with stack(1) as s:
            s.prefills[0].receipt, s.prefills[0].tokens_per_s, s.decodes[0].pause_s = SERVER, 200.0, 0.01
            begin = time.perf_counter()
            asked = {**body, "rid": "mine", "stream": stream}
            async with s.client.post(f"{s.url}/{route}", json=asked, headers=ASKS) as r:
                assert r.status == 200
                await r.read()
            took_ms = 1e3 * (time.perf_counter() - begin)
            receipt = json.loads(r.headers[RECEIPT_HEADER])
            assert receipt["rid"] == "mine"
            causes = receipt["causes"]
            assert {"computing": 7.0, "answering": 3.0}.items() <= causes.items()
            assert abs(sum(causes.values()) - receipt["ttft_ms"]) < 1e-6
            # Ten tokens took 50 ms at the server, but its receipt accounts for 10 ms.
            assert causes["router"] >= 35.0
            assert 50.0 <= receipt["ttft_ms"] <= took_ms
            assert abs(receipt["arrived_s"] - time.time()) < 30.0
            async with s.client.post(f"{s.url}/{route}", json=asked) as r:
                await r.read()
                assert RECEIPT_HEADER not in r.headers

    asyncio.run(run())


def test_receipt_includes_router_retries() -> None:
    async def run() -> None:
        async with stack(2) as s:
            for p in s.prefills:
                p.receipt = SERVER
            s.prefills[0].status = s.prefills[1].status = 503
            asking = asyncio.ensure_future(s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers=ASKS))
            while not any(p.refused for p in s.prefills):
                await asyncio.sleep(0.001)
            s.prefills[0].status = s.prefills[1].status = 200
            r = await asking
            assert r.status == 200
            assert json.loads(r.headers[RECEIPT_HEADER])["causes"]["router_retries"] > 0.0

    asyncio.run(run())


def test_receipt_includes_wait_in_router_queue() -> None:
    async def run() -> None:
        async with stack(1, args={"max_concurrent_requests": 1, "queue_size": 1}) as s:
            s.prefills[0].receipt = SERVER
            s.prefills[0].gate.clear()
            first = asyncio.create_task(s.post(text=SHORT))
            await s.until(lambda: s.lb.queue.in_flight == 1)
            asking = asyncio.create_task(s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers=ASKS))
            await s.until(lambda: s.lb.queue.waiting == 1)
            begin = time.monotonic()
            await asyncio.sleep(0.1)
            waited_ms = 1e3 * (time.monotonic() - begin)
            s.prefills[0].gate.set()
            await first
            receipt = json.loads((await asking).headers[RECEIPT_HEADER])
            assert waited_ms <= receipt["causes"]["router_queue"] <= receipt["ttft_ms"]

    asyncio.run(run())


@pytest.mark.parametrize("said", [None, {}, {"causes": [1], "ttft_ms": 3}])
def test_missing_or_invalid_receipt_is_omitted(said: Any) -> None:
    async def run() -> None:
        async with stack(1) as s:
            s.prefills[0].receipt = said
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers=ASKS) as r:
                assert r.status == 200
                assert RECEIPT_HEADER not in r.headers

    asyncio.run(run())
