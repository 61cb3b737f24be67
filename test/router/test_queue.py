"""Queue of the router: requests wait for a slot or for a server, in order and for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from .fakes import LONG, NO_PROBES, SHORT, Body, Stack, stack


@contextlib.asynccontextmanager
async def full(args: Body | None = None) -> AsyncIterator[tuple[Stack, asyncio.Task[Any]]]:
    """Run a router with one slot, taken by a request until the gates are opened."""
    async with stack(2, args={"max_concurrent_requests": 1, **(args or {})}) as s:
        for p in s.prefills:
            p.gate.clear()
        first = asyncio.create_task(s.post(text=SHORT))
        await s.until(lambda: s.lb.queue.in_flight == 1)
        try:
            yield s, first
        finally:
            for p in s.prefills:
                p.gate.set()
            assert (await first)[0] == 200
            await s.at_rest()


async def queued(s: Stack, n: int) -> None:
    await s.until(lambda: s.lb.queue.waiting == n)


def test_queue_serves_short_requests_before_long() -> None:
    async def run() -> None:
        done: list[str] = []

        async def one(text: str) -> int:
            status, _ = await s.post(text=text)
            done.append(text)
            return status

        async with full() as (s, first):
            waiting = []
            for i, text in enumerate((LONG, SHORT, LONG + "c", SHORT + "d")):
                waiting.append(asyncio.create_task(one(text)))
                await queued(s, i + 1)
            found = await s.status()
            assert (found["in_flight"], found["queued"], found["max_queued"]) == (1, 4, 100)
            assert found["oldest_queued_s"] > 0
            for p in s.prefills:
                p.gate.set()
            await first
            assert await asyncio.gather(*waiting) == [200] * 4
            assert done == [SHORT, SHORT + "d", LONG, LONG + "c"]
            assert (await s.status())["counts"]["waited"] == 4
            assert s.lb.queue.waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize("size", [0, 1])
def test_full_queue_returns_429(size: int) -> None:
    async def run() -> None:
        async with full({"queue_size": size}) as (s, _):
            waits = [asyncio.create_task(s.post(text=SHORT)) for _ in range(size)]
            await queued(s, size)
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                assert r.status == 429
                assert int(r.headers["retry-after"]) >= 1
                assert (await r.json())["error"]["type"] == "overloaded"
            assert (await s.status())["counts"]["rejected"] == 1
            for p in s.prefills:
                p.gate.set()
            assert [status for status, _ in await asyncio.gather(*waits)] == [200] * size

    asyncio.run(run())


def test_queue_timeout_returns_408() -> None:
    async def run() -> None:
        async with full({"queue_timeout_secs": 0.2}) as (s, _):
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                assert r.status == 408
                assert int(r.headers["retry-after"]) >= 1
            assert s.lb.queue.waiting == 0

    asyncio.run(run())


def test_disconnected_client_leaves_queue() -> None:
    async def run() -> None:
        async with full() as (s, _):
            async with aiohttp.ClientSession() as client:
                gone = asyncio.create_task(client.post(f"{s.url}/generate", json={"text": SHORT}))
                await queued(s, 1)
                gone.cancel()
            await queued(s, 0)
            await s.until(lambda: s.lb.counts.disconnected == 1)

    asyncio.run(run())


def test_queued_request_reserves_rid_and_can_be_aborted() -> None:
    async def run() -> None:
        async with full() as (s, first):
            waiting = asyncio.create_task(s.post(text=SHORT, rid="mine"))
            await queued(s, 1)
            status, reply = await s.post(text=SHORT, rid="mine")
            assert (status, "under way" in reply["error"]["message"]) == (400, True)
            async with s.client.post(f"{s.url}/abort_request", json={"rid": "mine"}) as r:
                assert r.status == 200
            # The abort ends the request at once, not when its turn comes.
            status, reply = await waiting
            assert (status, reply["error"]["type"]) == (400, "abort")
            for p in s.prefills:
                p.gate.set()
            await first
            assert sum(len(d.bodies) for d in s.decodes) == 1

    asyncio.run(run())


SLOW = {"alpha": 0.0, "linear": 0.01, "gamma_r": 0.0, "per_request": 0.0, "fixed": 0.0}
"""Latency model in which a token takes 10 ms."""


def test_request_predicted_late_is_refused_with_refuse_header() -> None:
    async def run() -> None:
        refuse = {"x-sgl-ttft-slo-late": "refuse"}

        async def one(slo_ms: int, text: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
            headers = {"x-sgl-ttft-slo-ms": str(slo_ms), **headers}
            return await s.client.post(f"{s.url}/generate", json={"text": text}, headers=headers)

        async with stack(2, config={"interval_s": 0.5}) as s:
            # The router does not know the servers' latency models yet.
            assert (await one(10_000, LONG, refuse)).status == 200
            for p in s.prefills:
                p.model = SLOW
            await s.until(lambda: all(i.outlook.own_model for i in s.lb.pools.instances))
            bodies = [len(p.bodies) for p in s.prefills]
            blocks = [len(i.prefixes) for i in s.lb.pools.instances]
            # About 2,000 tokens take 20 s.
            r = await one(10_000, "c" + LONG, refuse)
            assert (r.status, (await r.json())["error"]["type"]) == (429, "deadline_missed")
            assert 5 <= int(r.headers["retry-after"]) <= 20
            assert bodies == [len(p.bodies) for p in s.prefills]
            assert blocks == [len(i.prefixes) for i in s.lb.pools.instances], "it is held nowhere"
            assert (await one(10_000, SHORT, refuse)).status == 200
            assert (await one(10_000, "c" + LONG, {})).status == 200
            counts = (await s.status())["counts"]
            assert (counts["rejected"], counts["predicted_late"]) == (1, 1)
            async with s.client.get(f"{s.url}/metrics") as r:
                assert "laps_router_predicted_late_total 1.0" in await r.text()
            await s.at_rest()

    asyncio.run(run())


@pytest.mark.parametrize(("late", "status"), [("refuse", 429), ("serve", 200), (None, 200)])
def test_missed_deadline_is_refused_only_with_refuse_header(late: str | None, status: int) -> None:
    async def run() -> None:
        headers = {"x-sgl-ttft-slo-ms": "200"} | ({"x-sgl-ttft-slo-late": late} if late else {})

        async def one() -> aiohttp.ClientResponse:
            return await s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers=headers)

        async with full() as (s, _):
            asked = asyncio.create_task(one())
            await queued(s, 1)
            await asyncio.sleep(0.3)
            for p in s.prefills:
                p.gate.set()
            r = await asked
            assert r.status == status
            if status == 429:
                assert r.headers["retry-after"]
                assert (await r.json())["error"]["type"] == "deadline_missed"
            else:
                assert "x-sgl-ttft-slo-late" not in s.decodes[0].headers[-1]

    asyncio.run(run())


def test_invalid_late_header_returns_400() -> None:
    async def run() -> None:
        async with stack(2) as s:
            headers = {"x-sgl-ttft-slo-ms": "200", "x-sgl-ttft-slo-late": "maybe"}
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers=headers) as r:
                assert r.status == 400
                assert "'maybe'" in (await r.json())["error"]["message"]

    asyncio.run(run())


def test_request_waits_for_decode_server_to_recover() -> None:
    async def run() -> None:
        async with stack(2, args=NO_PROBES) as s:
            (decoder,) = s.lb.decoders
            decoder.healthy = False
            asked = asyncio.create_task(s.post(text=SHORT))
            await queued(s, 1)
            assert not s.decodes[0].bodies
            decoder.healthy = True
            assert (await asked)[0] == 200
            await s.at_rest()
            assert s.lb.queue.waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize("args", [{"queue_size": 0}, {"queue_timeout_secs": 0.1}])
def test_no_healthy_decode_server_returns_503(args: Body) -> None:
    async def run() -> None:
        async with stack(2, args={**NO_PROBES, **args}) as s:
            s.lb.decoders[0].healthy = False
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                assert (r.status, r.headers["retry-after"]) == (503, "1")
                assert (await r.json())["error"]["type"] == "no_instance"

    asyncio.run(run())
