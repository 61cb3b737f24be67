"""Fake servers with an address each, which a source of servers names, and requests while they come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from .fakes import FakeDecode, FakePrefill, Stack, World


@contextlib.asynccontextmanager
async def hosts(n: int) -> AsyncIterator[tuple[list[FakePrefill], FakeDecode]]:
    """``n`` prefill servers and a decode server, all at one port of addresses of their own."""
    world = World()
    prefills, decode = [FakePrefill(world) for _ in range(n)], FakeDecode(world)
    for k, server in enumerate((*prefills, decode)):
        server.host = f"127.0.0.{k + 1}"
        await server.start(prefills[0].port)
    try:
        yield prefills, decode
    finally:
        for server in (*prefills, decode):
            await server.stop()


@contextlib.asynccontextmanager
async def loaded(s: Stack) -> AsyncIterator[None]:
    """Requests all the while: none of them fails, and nothing is left of them."""
    ended = asyncio.Event()
    load = asyncio.create_task(s.load(ended))
    yield
    ended.set()
    assert (await load).keys() == {200}
    await s.at_rest()
