"""Servers that join, leave and are replaced while requests run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from sglang_router_laps import membership
from sglang_router_laps.servers import health
from sglang_router_laps.servers.discovery import Found

from .fakes import SHORT, FakeDecode, FakePrefill, FakeServer, Stack, entry, events_of, stack


@pytest.fixture(autouse=True)
def _no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LINGER_S", 0.1)


@contextlib.asynccontextmanager
async def loaded(s: Stack) -> AsyncIterator[None]:
    """Send requests from four clients during the block and require that none fails."""
    ended = asyncio.Event()
    load = asyncio.create_task(s.load(ended))
    try:
        yield
    finally:
        ended.set()
        statuses = await load
    assert statuses.keys() == {200}


async def killed(s: Stack, server: FakeServer) -> None:
    """Kill a server with nothing in flight, and wait until the router knows."""
    there = s.lb.members.at(server.url)
    assert there is not None
    await s.at_rest()
    await server.stop()
    while there.healthy:
        ended = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, ended.set)
        assert (await s.load(ended)).keys() == {200}


async def gone(s: Stack, url: str) -> None:
    await s.until(lambda: s.lb.members.at(url) is None)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_joined_server_gets_requests_once_healthy_until_removed(role: str) -> None:
    async def run() -> None:
        async with stack(2, 1) as s:
            new: FakeServer = FakePrefill(s.decodes[0].world) if role == "prefill" else FakeDecode(s.decodes[0].world)
            new.healthy = False
            await new.start()
            async with loaded(s):
                joined = s.lb.add("prefill" if role == "prefill" else "decode", f"{new.url}/", 8998, "test")
                await s.until(lambda: new.probed >= 2)
                assert not new.bodies
                assert not entry(await s.status(), new)["healthy"]
                new.healthy = True
                await s.until(lambda: len(new.bodies) > 8)
                s.lb.remove(new.url)
                await gone(s, new.url)
                seen = len(new.bodies)
                others = [*s.prefills, *s.decodes]
                before = [len(f.bodies) for f in others]
                await s.until(lambda: sum(len(f.bodies) for f in others) > sum(before) + 20)
                assert len(new.bodies) == seen
            found = await s.status()
            assert new.url not in str(found["prefill"] + found["decode"] + found["draining"] + found["tasks"])
            assert joined not in s.lb.instances
            await s.at_rest()
            await new.stop()

    asyncio.run(run())


def test_removed_server_finishes_requests_in_flight() -> None:
    async def run() -> None:
        async with stack(2, 2, make_decode=lambda w: FakeDecode(w, chunks=20, pause_s=0.05)) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                first = await r.content.readany()
                (busy,) = [d for d in s.decodes if d.running]
                (short,) = [p for p in s.prefills if p.bodies]
                for server in (busy, short):
                    assert s.lb.remove(server.url) is not None
                told = (await s.status())["draining"]
                assert [(i["role"], i["url"]) for i in told if i["outstanding_requests"]] == [("decode", busy.url)]
                assert (await s.post(text=SHORT))[0] == 200
                assert len(busy.bodies) == len(short.bodies) == 1
                rest = await r.read()
            assert (first + rest).count(b"data: ") == 21
            await gone(s, busy.url)
            assert not busy.aborted
            assert (await s.status())["draining"] == []

    asyncio.run(run())


def test_draining_server_is_removed_after_request_timeout() -> None:
    async def run() -> None:
        async with stack(2, 2, args={"request_timeout_secs": 10}) as s:
            s.prefills[0].gate.clear()
            s.prefills[1].gate.clear()
            request = asyncio.create_task(s.post(text=SHORT))
            await s.until(lambda: any(p.running for p in s.prefills))
            (busy,) = [p for p in s.prefills if p.running]
            s.lb.remove(busy.url)
            assert (await request)[0] == 504
            await gone(s, busy.url)

    asyncio.run(run())


def test_draining_server_added_again_is_reused_after_probes() -> None:
    async def run() -> None:
        async with stack(2, 1, make_decode=lambda w: FakeDecode(w, chunks=20, pause_s=0.05)) as s:
            decode = s.decodes[0]
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                await r.content.readany()
                old = s.lb.remove(decode.url)
                assert s.lb.add("decode", decode.url, None, "test") is old
                assert (await s.status())["draining"] == []
                await s.until(lambda: s.lb.decoders[0].healthy)
                assert len(await events_of(r)) >= 18
            assert (await s.post(text=SHORT))[0] == 200
            assert s.lb.instances.count(s.lb.decoders[0]) == 1

    asyncio.run(run())


def test_last_decode_server_can_be_removed_and_added_again() -> None:
    async def run() -> None:
        async with stack(2, 1, args={"queue_timeout_secs": 1}) as s:
            decode = s.decodes[0]
            s.lb.remove(decode.url)
            status, reply = await s.post(text=SHORT)
            assert (status, reply["error"]["message"]) == (503, "no decode server is healthy")
            async with s.client.get(f"{s.url}/health_generate") as r:
                assert r.status == 503
            await gone(s, decode.url)
            s.lb.add("decode", decode.url, None, "test")
            await s.until(lambda: s.lb.decoders[0].healthy)
            assert (await s.post(text=SHORT))[0] == 200

    asyncio.run(run())


def test_replacement_server_is_used_once_source_reports_change(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with stack(3, 1) as s:
            new = FakePrefill(s.decodes[0].world)
            await new.start()
            s.lb.members.follow("test", [Found("prefill", new.url, 8998, "one")])
            async with loaded(s):
                await s.until(lambda: len(new.bodies) > 4)
            # Probe so rarely that only the source's message can bring the server back in time.
            monkeypatch.setattr(health, "GROWTH", 1e6)
            monkeypatch.setattr(health, "PAUSE_MAX_S", 600.0)
            await killed(s, new)
            await asyncio.sleep(1)
            seen = len(new.bodies)
            await new.start(new.port)
            s.lb.members.follow("test", [Found("prefill", new.url, 8998, "two")])
            async with loaded(s):
                await s.until(lambda: len(new.bodies) > seen)
            await new.stop()

    asyncio.run(run())


def test_frequent_probes_find_unannounced_replacement_server() -> None:
    assert (1 + health.JITTER) * (health.PAUSE_MAX_S + health.PAUSE_S) < 4.0

    async def run() -> None:
        async with stack(4, 1) as s:
            short = s.pool("short")[0]
            await killed(s, short)
            async with loaded(s):
                await short.start(short.port)
                await s.until(lambda: bool(short.bodies))

    asyncio.run(run())


def test_only_changes_in_source_answer_are_applied(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with stack(2, 1) as s:
            members, fixed = s.lb.members, s.prefills[0].url
            one, two = Found("prefill", "http://127.0.0.1:1", 8998), Found("decode", "http://127.0.0.1:2")
            members.follow("a", [one, two, Found("prefill", fixed, 8998)])
            members.follow("b", [two, Found("decode", one.url)])
            assert f"{one.url} is there already, as prefill server of a" in caplog.text
            # A server that source b or the command line also names stays with the source that named it first.
            members.follow("b", [])
            members.follow("a", [one, two])
            assert {i.url for i in s.lb.instances} >= {one.url, two.url, fixed}
            assert not members.draining
            # An operator's removal lasts until the source's answer changes.
            s.lb.remove(one.url)
            members.follow("a", [one, two])
            assert [i.url for i in members.draining] == [one.url]
            await gone(s, one.url)
            members.follow("a", [two])
            members.follow("a", [one, Found("prefill", two.url, 8998)])
            assert [(i.url, i.role) for i in members.draining] == [(two.url, "decode")]
            assert {i.url for i in s.lb.pools.instances} >= {one.url, two.url}

    asyncio.run(run())


def test_joining_servers_are_distributed_among_pools() -> None:
    async def run() -> None:
        async with stack(2, 1) as s:
            for port in range(1, 5):
                s.lb.add("prefill", f"http://127.0.0.1:{port}", None, "test")
            assert [i.pool for i in s.lb.pools.instances] == ["short", "long", "long", "short", "long", "short"]
            assert [r.instance for r in s.lb.readers] == s.lb.pools.instances

    asyncio.run(run())


def test_server_stays_while_another_source_still_names_it() -> None:
    async def run() -> None:
        async with stack(2, 1) as s:
            members, one = s.lb.members, Found("prefill", "http://127.0.0.1:1", 8998)
            for source in ("a", "b"):
                members.follow(source, [one])
            members.follow("a", [])
            there = members.at(one.url)
            assert there is not None
            assert (members.source[there], list(members.draining)) == ("b", [])
            members.follow("b", [])
            assert list(members.draining) == [there]

    asyncio.run(run())


def test_every_spelling_of_url_is_same_server() -> None:
    async def run() -> None:
        async with stack(2, 1) as s:
            port = s.prefills[0].port
            assert s.lb.add("prefill", f"HTTP://127.0.0.1:{port}/", 8998, "test") is s.lb.pools.instances[0]
            new = s.lb.add("prefill", "http://Host.test:80", 8998, "test")
            assert new.url == "http://host.test"
            assert s.lb.add("prefill", "http://host.test", 8998, "test") is new

    asyncio.run(run())
