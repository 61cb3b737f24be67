"""Moves of servers between pools that this router carries out, with and without a record at the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("sglang_router")

from laps_core.pools.choice import Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import Move
from laps_core.pools.instances import Instance
from laps_core.protocol import PoolRecord
from sglang_router_laps.pools.record import Records
from sglang_router_laps.servers.upstream import Answer, Sessions


class Leaving(Sessions):
    """Connections to a server that sets its record. Meanwhile another server leaves."""

    def __init__(self, pools: Pools, leaves: Instance) -> None:
        super().__init__()
        self._pools, self._leaves = pools, leaves

    async def request(self, *_: Any, **__: Any) -> Answer:
        self._pools.leave(self._leaves)
        return 200, b'{"assignment": "long", "version": 2}'


def test_server_that_leaves_during_moves_stops_no_other_move() -> None:
    pools = Pools([(f"http://p{i}:1", 1) for i in range(3)], AllocConfig(initial_short=1), lambda: 0.0)
    first, leaves, _ = pools.instances
    first.adopt_record(PoolRecord(assignment="short", version=1))
    moves = [Move(first.url, "short", "long", 0.0, "test"), Move(leaves.url, "long", "short", 0.0, "test")]
    assert asyncio.run(Records(pools, Leaving(pools, leaves)).carry_out(moves)) == moves
    assert first.pool == "long"
