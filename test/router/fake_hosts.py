"""Fake servers with an address each, for tests of server sources, and load while such servers come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from .fakes import FakeDecode, FakePrefill, Stack, World


@contextlib.asynccontextmanager
async def hosts(n: int) -> AsyncIterator[tuple[list[FakePrefill], FakeDecode]]:
    """Run ``n`` prefill servers and a decode server, each at its own address, all at the same port."""
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
    """Send requests during the block. Require that none fails and that no request leaves anything behind."""
    ended = asyncio.Event()
    load = asyncio.create_task(s.load(ended))
    yield
    ended.set()
    assert (await load).keys() == {200}
    await s.at_rest()
