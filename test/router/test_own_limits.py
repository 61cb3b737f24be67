"""Limits of the router itself: if the router lacks descriptors, memory, a name or TLS, it must not blame a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .fakes import LONG, NO_PROBES, SHORT, FakeDecode, Stack, World, entry, stack


@contextlib.asynccontextmanager
async def separate_router(
    s: Stack, limit: tuple[int, int] | None, tmp: Path, *more: str, space: int | None = None
) -> AsyncIterator[tuple[int, str]]:
    """Run a router in a separate process in front of the fakes of ``s`` and yield (pid, URL). ``limit``: descriptors;
    ``space``: address space (bytes)."""

    def bound() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        if space:
            resource.setrlimit(resource.RLIMIT_AS, (space, space))

    flags = [f for p in s.prefills for f in ("--prefill", p.url, "8998")]
    flags += [f for d in s.decodes for f in ("--decode", d.url)]
    with (tmp / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sglang_router_laps.launch_router", "--mini-lb", "--pd-disaggregation",
            "--enable-laps-alloc", "--host", "127.0.0.1", "--port", "0", *flags, *more, stdout=log, stderr=log,
            preexec_fn=bound if limit or space else None,
        )  # fmt: skip
        try:
            async with asyncio.timeout(180):
                while b"running on http" not in (text := (tmp / "router.log").read_bytes()):
                    assert process.returncode is None, text.decode()
                    await asyncio.sleep(0.05)
            url = text.split(b"running on ", 1)[1].split()[0].decode()
            yield process.pid, url
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def test_descriptor_shortage_returns_503_and_keeps_servers_healthy(tmp_path: Path) -> None:
    async def run() -> None:
        async with stack(2, 2) as s, separate_router(s, None, tmp_path) as (pid, url):
            async with s.client.post(f"{url}/generate", json={"text": SHORT}) as r:
                assert r.status == 200
            # The router closes idle connections to servers after 4 s; only then it needs a new connection.
            async with asyncio.timeout(120):
                while any(f.connections for f in (*s.prefills, *s.decodes)) or s.decodes[0].port in open_ports(pid):
                    await asyncio.sleep(0.2)
            async with aiohttp.ClientSession() as client:
                async with client.get(f"{url}/laps_status") as r:
                    await r.read()
                before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                # A limit below the number of open descriptors: these stay, but the router cannot open another.
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
                async with client.post(f"{url}/generate", json={"text": LONG}) as r:
                    # Read to the end, so that the client reuses this connection: the router cannot accept a new one.
                    await r.read()
                    assert r.status == 503
                    assert r.headers["retry-after"] == "1"
                async with client.get(f"{url}/laps_status") as r:
                    found = await r.json()
                assert all(i["healthy"] and not i["lost"] for i in (*found["prefill"], *found["decode"]))
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
                async with client.post(f"{url}/generate", json={"text": LONG}) as r:
                    assert r.status == 200

    asyncio.run(run())


def open_ports(pid: int) -> set[int]:
    """Return the remote ports to which the process is connected."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd))
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        field = line.split()
        if f"socket:[{field[9]}]" in inodes:
            found.add(int(field[2].split(":")[1], 16))
    return found


def test_router_with_60_descriptors_limits_requests_in_flight(tmp_path: Path) -> None:
    async def run() -> None:
        def slow(world: World) -> FakeDecode:
            return FakeDecode(world, pause_s=0.1)

        async with (
            stack(2, 2, make_decode=slow) as s,
            separate_router(s, (60, 60), tmp_path) as (_, url),
            aiohttp.ClientSession() as client,
        ):
            async with client.get(f"{url}/laps_status") as r:
                assert (await r.json())["max_inflight"] < 20

            async def one() -> int:
                async with client.post(f"{url}/generate", json={"text": SHORT}) as r:
                    await r.read()
                    return r.status

            statuses = await asyncio.gather(*(one() for _ in range(20)))
            assert set(statuses) <= {200, 429, 503}
            assert 200 in statuses
            async with client.get(f"{url}/laps_status") as r:
                found = await r.json()
            assert all(i["healthy"] for i in (*found["prefill"], *found["decode"]))

    asyncio.run(run())


def test_idle_connections_lock_out_no_new_client(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            stack(2) as s,
            separate_router(s, (256, 256), tmp_path) as (_, url),
            contextlib.AsyncExitStack() as idle,
            aiohttp.ClientSession() as client,
        ):
            host, port = url.removeprefix("http://").split(":")
            for _ in range(300):
                _, writer = await asyncio.open_connection(host, int(port))
                idle.callback(writer.close)

            async def status() -> int:
                closing = {"connection": "close"}
                async with client.post(f"{url}/generate", json={"text": SHORT}, headers=closing) as r:
                    return r.status

            async with asyncio.timeout(60):
                # The router looks ten times a second; until then, the event loop resets what exceeds the limit.
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        if await status() == 200:
                            break
            assert [await status() for _ in range(3)] == [200] * 3

    asyncio.run(run())


def test_descriptor_limit_is_raised_to_hard_limit_at_start(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run() -> None:
        async with stack(2) as s, separate_router(s, (128, hard), tmp_path) as (pid, _):
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)

    asyncio.run(run())


class NoName(aiohttp.abc.AbstractResolver):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def resolve(self, *_: Any, **__: Any) -> Any:
        raise OSError(-3, "Temporary failure in name resolution")

    async def close(self) -> None:
        pass


def test_dns_failure_returns_503_and_keeps_server_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiohttp.connector.DefaultResolver", NoName)

    async def run() -> None:
        async with stack(2, 0, more_decodes=["http://decode.example:1"], args=NO_PROBES) as s:
            for _ in range(5):
                async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                    assert r.status == 503
                    assert r.headers["retry-after"] == "1"
                    assert "decode.example" in (await r.json())["error"]["message"]
            assert entry(await s.status(), "http://decode.example:1")["healthy"]
            await s.at_rest()

    asyncio.run(run())


def test_tls_failure_is_retried_elsewhere_and_keeps_server_healthy() -> None:
    async def run() -> None:
        async with stack(2, 1) as plain:
            wrong = plain.decodes[0].url.replace("http:", "https:")
            async with stack(2, 1, more_decodes=[wrong], args=NO_PROBES) as s:
                for _ in range(6):
                    assert (await s.post(text=SHORT))[0] == 200
                found = await s.status()
                assert entry(found, wrong)["healthy"]
                assert found["counts"]["retried"] >= 1

    asyncio.run(run())
