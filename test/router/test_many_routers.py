"""Two routers in front of the same servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from .fakes import SHORT, Stack, router_before, stack
from .test_aborts import StrictDecode, StrictPrefill

FAST = {"interval_s": 0.5, "initial_short": 2}


@asynccontextmanager
async def pair(**more: Any) -> AsyncIterator[tuple[Stack, Stack]]:
    async with stack(4, config=FAST, **more) as one, router_before(one.prefills, one.decodes, FAST) as other:
        yield one, other


@asynccontextmanager
async def under_way() -> AsyncIterator[tuple[Stack, Stack, asyncio.Task[Any]]]:
    """Run two routers. The first has a request with the id ``mine`` in flight until the gates are opened."""
    async with pair(make_prefill=StrictPrefill, make_decode=StrictDecode) as (one, other):
        for p in one.prefills:
            p.gate.clear()
        sent = asyncio.create_task(one.post(text=SHORT, rid="mine"))
        await one.until(lambda: one.decodes[0].running == 1 and sum(p.running for p in one.prefills) == 1)
        yield one, other, sent


def pools(s: Stack) -> dict[str, Any]:
    return {i.url: i.pool for i in s.lb.pools.instances}


def test_routers_share_pool_records_and_only_one_moves_server() -> None:
    async def run() -> None:
        async with pair() as (one, other):
            for p in one.prefills[:2]:
                p.load = {"backlog_tokens": 40_000, "slo_deviation": 0.0, "busy_share": 1.0}
            await one.until(lambda: len(one.pool("short")) == 3)
            # The pages of both routers show the move, whichever router made it.
            await one.until(lambda: all(len(s.lb.journal.moves) == 1 for s in (one, other)))
            assert pools(one) == pools(other) == {p.url: p.pool.assignment for p in one.prefills}
            told = [await s.status() for s in (one, other)]
            assert sum(t["counts"]["moves"]["short"] for t in told) == 1
            assert "moved by another router" in {t["migrations"][0]["reason"] for t in told}

    asyncio.run(run())


def test_new_router_adopts_pools_and_restarted_server_gets_assignment() -> None:
    async def run() -> None:
        async with stack(4, config=FAST) as one:
            await one.until(lambda: all(p.pool.assignment for p in one.prefills))
            moved = one.prefills[3]
            moved.pool = type(moved.pool)(assignment="short", version=moved.pool.version + 1)
            async with router_before(one.prefills, one.decodes, FAST) as late:
                await late.until(lambda: len(late.pool("short")) == 3)
                assert not any((await late.status())["counts"]["moves"].values())
                await one.until(lambda: pools(one) == pools(late))
                port = moved.port
                await moved.stop()
                await moved.start(port)
                assert not moved.pool.assignment
                await one.until(lambda: moved.pool.assignment == "short")

    asyncio.run(run())


def test_abort_at_other_router_ends_request() -> None:
    async def run() -> None:
        async with under_way() as (one, other, sent):
            async with other.client.post(f"{other.url}/abort_request", json={"rid": "mine"}) as r:
                assert r.status == 200
            status, said = await sent
            assert "bort" in str(said), (status, said)
            await one.at_rest()
            assert not any(f.running for f in (*one.prefills, *one.decodes))

    asyncio.run(run())


def test_servers_refuse_rid_in_use_at_other_router() -> None:
    async def run() -> None:
        async with under_way() as (one, other, first):
            status, said = await other.post(text=SHORT, rid="mine")
            assert (status, "Duplicate" in str(said)) == (400, True)
            for p in one.prefills:
                p.gate.set()
            assert (await first)[0] == 200

    asyncio.run(run())
