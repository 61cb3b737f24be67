"""Servers that are lost or answer with an error: answers to clients, and the choice of another server."""

from __future__ import annotations

import asyncio
import json

import pytest

from .fakes import SHORT, FakeDecode, FakePrefill, World, events_of, stack

BODY = {"text": SHORT}


def test_refused_connection_is_retried_with_new_bootstrap_room() -> None:
    async def run() -> None:
        async with stack(4, 2) as s:
            dead = s.pool("short")[0]
            await dead.stop()
            await s.decodes[0].stop()
            for _ in range(6):
                status, _ = await s.post(text=SHORT)
                assert status == 200
            found = await s.status()
            assert found["counts"]["retried"] >= 1
            assert [p["healthy"] for p in found["prefill"] if p["url"] == dead.url] == [False]
            assert not found["decode"][0]["healthy"]
            rooms = [b["bootstrap_room"] for d in s.decodes for b in d.bodies]
            assert len(rooms) == len(set(rooms))
            await s.at_rest()

    asyncio.run(run())


@pytest.mark.parametrize("n", [8, 16], ids=["a few", "as many as open its breaker"])
def test_killed_prefill_server_loses_no_waiting_request_and_recovers(n: int) -> None:
    async def run() -> None:
        def held(world: World) -> FakePrefill:
            p = FakePrefill(world)
            p.gate.clear()
            return p

        async with stack(2, config={"spill": "off"}, make_prefill=held) as s:
            short, long = s.pool("short")[0], s.pool("long")[0]
            waiting = [asyncio.create_task(s.post(text=SHORT, stream=False)) for _ in range(n)]
            await s.until(lambda: len(short.bodies) == n)
            port = short.port
            await short.stop()
            await s.until(lambda: len(long.bodies) == n)
            long.gate.set()
            assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * n
            await s.at_rest()
            assert (await s.status())["counts"]["failed"] == 0

            # A request meets the closed port and is served by the other pool; the lost server leaves its pool.
            assert (await s.post(text=SHORT))[0] == 200
            instance = s.lb.pools.by_url(f"http://127.0.0.1:{port}")
            assert not instance.healthy
            short.gate.set()
            await short.start(port)
            await s.until(lambda: instance.healthy)
            before = len(short.bodies)
            assert (await s.post(text=SHORT))[0] == 200
            assert len(short.bodies) == before + 1

    asyncio.run(run())


def test_running_stream_survives_loss_of_prefill_server() -> None:
    async def run() -> None:
        async with stack(2, make_decode=lambda w: FakeDecode(w, chunks=5, pause_s=0.05)) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                await r.content.readany()
                await s.pool("short")[0].stop()
                assert b"[DONE]" in await r.read()
            await s.at_rest()

    asyncio.run(run())


def test_lost_decode_server_ends_stream_with_error_event() -> None:
    async def run() -> None:
        def breaking(world: World) -> FakeDecode:
            d = FakeDecode(world, pause_s=0.02)
            d.break_after = 2
            return d

        async with stack(2, make_decode=breaking) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                events = await events_of(r)
            assert json.loads(events[0])["text"] == "t0"
            assert json.loads(events[-1])["error"]["type"] == "upstream_lost"
            await s.at_rest()
            assert (await s.status())["counts"]["failed"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_server_error_is_returned_and_other_leg_is_aborted(role: str) -> None:
    async def run() -> None:
        async with stack(2) as s:
            prefill, decode = s.pool("short")[0], s.decodes[0]
            failing, other = (prefill, decode) if role == "prefill" else (decode, prefill)
            failing.status = 429
            prefill.gate.set() if role == "prefill" else prefill.gate.clear()
            status, reply = await s.post(text=SHORT)
            assert (status, reply["error"]["message"]) == (429, "no")
            await s.at_rest()
            await s.until(lambda: len(other.aborted) == 1)
            prefill.gate.set()

    asyncio.run(run())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_healthy_server_returns_503_with_retry_after(role: str) -> None:
    async def run() -> None:
        async with stack(2, args={"queue_timeout_secs": 1}) as s:
            for server in s.prefills if role == "prefill" else s.decodes:
                await server.stop()
            # The first requests find out that the servers are gone: one connects, the other one's connection is cut.
            for n in (2, 1):
                for reply in await asyncio.gather(*(s.client.post(f"{s.url}/generate", json=BODY) for _ in range(n))):
                    async with reply as r:
                        assert (r.status, r.headers.get("retry-after")) == (503, "1"), await r.read()
                        assert (await r.json())["error"]["type"] == "no_instance"
            await s.at_rest()

    asyncio.run(run())


def test_refused_connections_alone_are_a_503() -> None:
    """No server has seen the request, so it can be sent again."""

    async def run() -> None:
        async with stack(2, args={"retry_max_retries": 1}) as s:
            for server in s.prefills:
                await server.stop()
            async with s.client.post(f"{s.url}/generate", json=BODY) as r:
                assert (r.status, r.headers.get("retry-after")) == (503, "1"), await r.read()
            await s.at_rest()

    asyncio.run(run())
