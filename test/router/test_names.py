"""Servers behind one DNS name: addresses that come and go, and a resolver that fails."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from sglang_router_laps import membership
from sglang_router_laps.servers.discovery import Found, names
from sglang_router_laps.servers.discovery.names import Name

from .fake_hosts import hosts, loaded
from .fakes import Stack, stack

PREFILL, DECODE = "prefill.test", "decode.test"


class Resolver:
    """Replacement for the system's resolver, for the names of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, list[str]] = {}
        """Addresses by name; a name without addresses fails to resolve."""
        self.asked = 0
        monkeypatch.setattr(names, "PERIOD_S", 0.05)
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked += 1
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        families = [socket.AF_INET6 if ":" in a else socket.AF_INET for a in self.addresses[host]]
        return [(f, 1, 6, "", (a, port)) for f, a in zip(families, self.addresses[host], strict=True)]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    monkeypatch.setattr(membership, "LINGER_S", 0.1)
    # An import of SGLang by another test installs a loop with its own resolver (uvloop).
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    yield Resolver(monkeypatch)
    asyncio.set_event_loop_policy(before)


async def told(resolver: Resolver, source: Name) -> list[Found]:
    """Return the servers that the source finds by its first lookup of the name."""
    first: asyncio.Future[list[Found]] = asyncio.get_running_loop().create_future()

    def follow(found: Iterable[Found]) -> None:
        if not first.done():
            first.set_result([*found])

    task = asyncio.create_task(source.run(follow))
    try:
        return await asyncio.wait_for(first, 120)
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("addresses", "urls"),
    [
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]),
        (["10.0.0.1", "fd00::1"], ["http://10.0.0.1:30000"]),
        (["fd00::1"], ["http://[fd00::1]:30000"]),
    ],
    ids=["several", "both kinds", "IPv6"],
)
def test_dns_addresses_become_server_urls(resolver: Resolver, addresses: list[str], urls: list[str]) -> None:
    resolver.addresses[PREFILL] = addresses
    source = Name("prefill", f"dns://{PREFILL}:30000", 8998)
    assert asyncio.run(told(resolver, source)) == [Found("prefill", url, 8998) for url in urls]


def test_servers_follow_dns_changes(resolver: Resolver, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with hosts(3) as (prefills, decode):
            args = {
                "prefill_urls": [(f"dns://{PREFILL}:{prefills[0].port}", 8998)],
                "decode_urls": [f"dns://{DECODE}:{decode.port}"],
            }
            async with stack(0, 0, args=args) as s:
                # The router knows no address yet, and the resolver fails.
                await s.until(lambda: resolver.asked > 4)
                assert (await s.post(text="a"))[0] == 503
                assert caplog.text.count(f"dns://{DECODE}:{decode.port}: ") == 1

                resolver.addresses[DECODE] = [decode.host]
                resolver.addresses[PREFILL] = [p.host for p in prefills[:2]]
                await s.until(lambda: [i.healthy for i in s.lb.instances] == [True] * 3)
                async with loaded(s):
                    await s.until(lambda: all(p.bodies for p in prefills[:2]))

                    resolver.addresses[PREFILL] = [p.host for p in prefills[1:]]
                    await s.until(lambda: s.lb.members.at(prefills[0].url) is None)
                    assert urls(s) == {p.url for p in prefills[1:]}
                    await s.until(lambda: bool(prefills[2].bodies))
                    await prefills[0].stop()

                    del resolver.addresses[PREFILL]
                    asked = resolver.asked
                    await s.until(lambda: resolver.asked > asked + 6)
                    assert urls(s) == {p.url for p in prefills[1:]}

    asyncio.run(run())


def urls(s: Stack) -> set[str]:
    return {i.url for i in s.lb.pools.instances}
