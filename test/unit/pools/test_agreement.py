"""Several routers in front of the same servers, with different clocks and slow, lossy networks: their agreement on
pools, its delay, and the number of moves."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import virtual
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.pools.choice import Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.instances import Instance
from laps_core.pools.pressure import BOTH, Work
from laps_core.protocol import POOL_ROUTE, PoolChange, PoolRecord
from sglang_router_laps.pools.control import Control
from sglang_router_laps.pools.record import Records
from sglang_router_laps.servers.signals import SignalReader
from sglang_router_laps.servers.upstream import Answer, Sessions

PERIOD_S = 5.0
BEAT_S = PERIOD_S / 5


@dataclass
class Server:
    """Prefill server with LAPS: its pool record and the history of its changes."""

    url: str
    keeps: bool = True
    record: PoolRecord = field(default_factory=PoolRecord)
    changes: list[tuple[float, str]] = field(default_factory=list)
    writable: bool = True
    busy_s: dict[str, float] = field(default_factory=lambda: {"short": 0.0, "long": 0.0})
    read_at: float = 0.0

    def set(self, body: Any) -> Answer:
        if not self.writable:
            return 401, b'{"error": "Unauthorized"}'
        made = msgspec.convert(body, PoolChange).of(self.record)
        if made is None:
            return 409, msgspec.json.encode(self.record)
        if made.assignment != self.record.assignment:
            self.changes.append((asyncio.get_running_loop().time(), str(made.assignment)))
        self.record = made
        return 200, msgspec.json.encode(made)


@dataclass
class Cluster:
    """The servers, and the arriving work of each class (in servers)."""

    servers: list[Server]
    work: Work
    rng: random.Random
    delay_s: float = 0.0
    loss: float = 0.0

    def status(self, server: Server, pool: str) -> bytes:
        """Return a server's /laps_status. `pool`: pool of servers with empty records. More work, more backlog."""
        pools = [s.record.assignment or pool for s in self.servers]
        mine, now = server.record.assignment or pool, asyncio.get_running_loop().time()
        each = {
            c: work / max(1, sum(p in (c, BOTH) for p in pools)) if mine in (c, BOTH) else 0.0
            for c, work in self.work._asdict().items()
        }
        span, server.read_at = now - server.read_at, now
        server.busy_s = {c: server.busy_s[c] + min(1.0, each[c]) * span for c in each}
        load = {
            "backlog_tokens": 8192 * sum(each.values()),
            "slo_deviation": 0.0,
            "busy_share": 1.0,
            "backlog_s": {c: max(0.0, x - 1.0) for c, x in each.items()},
            "busy_s": server.busy_s,
        }
        keeps = {"pool": msgspec.to_builtins(server.record)} if server.keeps else {}
        return json.dumps({"enabled": True, "load": load, **keeps}).encode()


class Wire(Sessions):
    """Connections of one router to a Site, with delays and losses."""

    def __init__(self, site: Cluster) -> None:
        super().__init__()
        self._site = site

    async def request(
        self, instance: Instance, path: str, timeout_s: float, key: str | None = None, method: str = "GET", **more: Any
    ) -> Answer:
        site = self._site
        server = next(s for s in site.servers if s.url == instance.url)
        await asyncio.sleep(site.rng.uniform(0.0, site.delay_s))
        if site.rng.random() < site.loss:
            raise ConnectionResetError
        if path == POOL_ROUTE:
            answer = server.set(more["json"])
        else:
            answer = 200, site.status(server, str(getattr(instance, "pool", "")))
        await asyncio.sleep(site.rng.uniform(0.0, site.delay_s))
        if site.rng.random() < site.loss:
            raise ConnectionResetError
        return answer


class PoolDecider:
    """Part of a router that decides on pools; its clock is off by ``skew_s``."""

    def __init__(self, site: Cluster, skew_s: float = 0.0, *, divided: bool = True) -> None:
        config = AllocConfig(interval_s=PERIOD_S, initial_short=len(site.servers) // 2 if divided else None)
        loop = asyncio.get_running_loop()

        def clock() -> float:
            return loop.time() + skew_s

        wire = Wire(site)
        self.pools = Pools([(s.url, 1) for s in site.servers], config, clock)
        self.readers = [SignalReader(i, wire, 1.0) for i in self.pools.instances]
        self.moves = 0
        records = Records(self.pools, wire)
        self.control = Control(self.pools, self.readers, records, config, self._note, clock)
        self.task = asyncio.create_task(self.control.run())

    def _note(self, *told: Any) -> None:
        self.moves += len(told[2])

    def view(self) -> dict[str, str]:
        return {i.url: i.pool for i in self.pools.instances}


def servers(n: int) -> list[Server]:
    return [Server(f"http://p{i:02}") for i in range(n)]


def changes(site: Cluster) -> list[float]:
    """Return the times of all changes of servers' pools, without the first setting of each."""
    return sorted(at for s in site.servers for at, _ in s.changes[1:])


def even(n: int) -> Work:
    """Return work that ``n`` servers in two equal pools can do."""
    return Work(0.3 * n, 0.3 * n)


def more_short(n: int) -> Work:
    """Return work for which most of ``n`` servers must serve short prompts; for three servers, work that divides an
    undivided fleet."""
    return Work(0.9, 1.4) if n == 3 else Work(0.6 * n, 0.1 * n)


@cache
def needed(n: int) -> int:
    """Return the number of moves that a single router makes when ``more_short`` arrives."""

    async def alone() -> int:
        site = Cluster(servers(n), even(n), random.Random(0))
        seat = PoolDecider(site, divided=n != 3)
        await asyncio.sleep(20.0)
        site.work = more_short(n)
        await asyncio.sleep(120.0)
        return seat.moves

    return virtual.run(alone())


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    routers=st.integers(2, 5),
    n=st.sampled_from([2, 3, 4, 8]),
    delay_s=st.sampled_from([0.0, 0.01, 0.2, 0.45]),
    late_s=st.lists(st.floats(0.0, 40.0), min_size=5, max_size=5),
)
def test_routers_agree_and_make_at_most_one_extra_move(
    seed: int, routers: int, n: int, delay_s: float, late_s: Sequence[float]
) -> None:
    alone = needed(n)

    async def scenario() -> None:
        rng = random.Random(seed)
        site = Cluster(servers(n), even(n), rng, delay_s)
        seats = [PoolDecider(site, rng.uniform(-1e6, 1e6), divided=n != 3)]
        loop = asyncio.get_running_loop()
        starts = sorted(late_s[: routers - 1])
        ended = loop.time() + 100.0
        while loop.time() < ended:
            await asyncio.sleep(0.1)
            if loop.time() > 20.0:
                site.work = more_short(n)
            if starts and loop.time() >= starts[0]:
                starts.pop(0)
                seats.append(PoolDecider(site, rng.uniform(-1e6, 1e6), divided=n != 3))
                # The first query takes as long as the way there and back.
                await asyncio.sleep(2 * delay_s + 0.1)
            # Two signal periods, and the network time to query, to be refused a move, and to query again.
            recent = [at for s in site.servers for at, _ in s.changes if loop.time() - at < 2 * BEAT_S + 4 * delay_s]
            if loop.time() > 2 * BEAT_S and not recent:
                told = {s.url: s.record.assignment for s in site.servers}
                assert [seat.view() for seat in seats] == [told] * len(seats), loop.time()
        made = changes(site)
        assert len(made) <= alone + 1
        assert len(made) == sum(seat.moves for seat in seats)
        # All moves of one decision are close together; the next decision comes after their effect is visible.
        assert all(b - a < BEAT_S or b - a >= 0.9 * PERIOD_S - 2 * BEAT_S for a, b in pairwise(made))

    virtual.run(scenario())


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_routers_agree_again_after_lost_answers_and_restarts(seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        site = Cluster(servers(4), even(4), rng, 0.1, loss=0.1)
        seats = [PoolDecider(site, rng.uniform(-1e6, 1e6)) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(rng.uniform(1.0, 6.0))
            rng.choice(site.servers).record = PoolRecord()
            gone = seats.pop(rng.randrange(3))
            gone.task.cancel()
            seats.append(PoolDecider(site, rng.uniform(-1e6, 1e6)))
            site.work = rng.choice([Work(2.4, 0.4), Work(0.4, 2.4)])
        site.work, site.loss = even(4), 0.0
        # One beat finds a server that has just restarted; another beat shows what it was told then.
        await asyncio.sleep(3 * BEAT_S)
        while any(asyncio.get_running_loop().time() - at < 2 * BEAT_S for at in changes(site)):
            await asyncio.sleep(0.1)
        told = {s.url: s.record.assignment for s in site.servers}
        assert None not in told.values()
        assert all(seat.view() == told for seat in seats)
        assert {"short", "long"} == set(told.values())

    virtual.run(scenario())


def test_late_router_adopts_existing_pools() -> None:
    async def scenario() -> None:
        site = Cluster(servers(4), more_short(4), random.Random(1))
        first = PoolDecider(site)
        await asyncio.sleep(60.0)
        first.task.cancel()
        made = {s.url: s.record for s in site.servers}
        assert [r.assignment for r in made.values()].count("short") == 3
        late = PoolDecider(site)
        await asyncio.sleep(0.1)
        assert late.view() == {url: r.assignment for url, r in made.items()}
        await asyncio.sleep(60.0)
        assert {s.url: s.record for s in site.servers} == made

    virtual.run(scenario())


@pytest.mark.parametrize("others_s", [0.0, 0.5, 2.4])
def test_only_one_router_moves_when_several_choose_different_servers(others_s: float) -> None:
    assert needed(8) > 1

    async def scenario() -> None:
        site = Cluster(servers(8), even(8), random.Random(1), delay_s=0.02)
        seats = [PoolDecider(site)]
        await asyncio.sleep(others_s)
        seats += [PoolDecider(site), PoolDecider(site)]
        await asyncio.sleep(11.0)
        for seat, i in zip(seats, (5, 6, 7), strict=True):
            # For each router another server is the cheapest to move.
            for instance in seat.pools.instances:
                instance.outstanding_tokens = 0 if instance is seat.pools.instances[i] else 1000
        site.work = more_short(8)
        while not changes(site):
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.8 * PERIOD_S)
        assert sorted(bool(seat.moves) for seat in seats) == [False, False, True]
        assert 0 < len(changes(site)) == sum(seat.moves for seat in seats) <= needed(8)
        assert seats[0].view() == seats[1].view() == seats[2].view()

    virtual.run(scenario())


@pytest.mark.parametrize("change", ["keeps", "writable"])
def test_each_router_moves_pools_by_itself_without_writable_records(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        site = Cluster(servers(4), more_short(4), random.Random(1))
        for s in site.servers:
            setattr(s, change, False)
        seats = [PoolDecider(site), PoolDecider(site)]
        await asyncio.sleep(60.0)
        assert [list(seat.view().values()).count("short") for seat in seats] == [3, 3]
        assert [seat.moves for seat in seats] == [1, 1]

    with caplog.at_level(logging.WARNING):
        virtual.run(scenario())
    # A router that may not write the record logs that once for each server.
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (8 if change == "writable" else 0)
    assert all("--api-key" in line for line in said)
