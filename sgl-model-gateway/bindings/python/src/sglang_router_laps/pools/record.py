"""Pool records: each prefill server with LAPS stores its pool, and all routers change it by compare-and-set.

Before a router moves servers, it sets the record of the first server by URL, if necessary to its present value. A
router that has read an older version of that record fails to set it and moves nothing. So only one of several routers
that decide at once wins. The other routers notice its moves by a greater version: records hold versions, but no time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from laps_core.pools.choice import Pools
from laps_core.pools.controller import Move
from laps_core.pools.prefill import PrefillInstance
from laps_core.protocol import POOL_ROUTE, Assignment, PoolRecord, read

from ..servers.upstream import Sessions

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
"""Time limit for a server's answer (seconds)."""


class Records:
    """Reader and writer of the servers' pool records. ``PrefillInstance.record`` is the record read last."""

    def __init__(self, pools: Pools, sessions: Sessions) -> None:
        self._pools = pools
        self._sessions = sessions
        self._known: dict[str, PoolRecord] = {}
        """Records that have been taken into account, by URL."""
        self._refused: set[str] = set()
        """Servers whose refusal has been logged."""

    def news(self) -> list[Move] | None:
        """Return other routers' moves since the last call, perhaps none; None if no other router has set a record."""
        moved: list[Move] | None = None
        for i in self._pools.instances:
            record = i.record
            if record is None:
                continue
            before = self._known.get(i.url, record)
            self._known[i.url] = record
            # A restarted server's versions start from 0.
            if 0 < before.version < record.version:
                moved = moved or []
                source, target = before.assignment, record.assignment
                if source and target and source != target:
                    moved.append(Move(i.url, source, target, time.monotonic(), "moved by another router"))
        return moved

    async def fill(self) -> None:
        """Set each record without a pool to the server's pool at this router. The first router to do so wins."""
        new = [i for i in self._pools.instances if i.healthy and i.record and not i.record.assignment]
        await asyncio.gather(*(self._set(i, i.pool) for i in new))

    async def carry_out(self, moves: Sequence[Move]) -> list[Move]:
        """Carry out ``moves`` and return the moves made: none if another router was first. A server without a record
        moves for this router alone."""
        moving = {self._pools.by_url(m.name): m for m in moves}
        agreed = [i for i in self._pools.instances if i.healthy and i.record and i.record.assignment]
        first = min(agreed, key=lambda i: i.url) if moves and agreed else None
        if first and not await self._set(first, moving[first].target if first in moving else first.pool):
            return []
        rest = [i for i in moving if i is not first]
        made = await asyncio.gather(*(self._move(i, moving[i]) for i in rest))
        return [m for i, m in moving.items() if i is first or made[rest.index(i)]]

    async def _move(self, instance: PrefillInstance, move: Move) -> bool:
        if instance.record and instance.record.assignment:
            return await self._set(instance, move.target)
        # Not by its URL: the server may have left meanwhile.
        instance.pool = move.target
        return True

    async def _set(self, instance: PrefillInstance, assignment: Assignment) -> bool:
        """Set the server's record. Return True if set; if another router was first, adopt that router's record."""
        record = instance.record or PoolRecord()
        body = {"assignment": assignment, "if_version": record.version}
        answer = await self._sessions.post(instance, POOL_ROUTE, self._sessions.key, TIMEOUT_S, body)
        if answer is None:
            return False
        status, text = answer
        try:
            if status in (200, 409):
                made = read(text, PoolRecord)
                instance.adopt_record(made)
                if status == 200:
                    # This router's own change must not count as news.
                    self._known[instance.url] = made
                return status == 200
        except ValueError:
            pass
        if instance.url not in self._refused:
            self._refused.add(instance.url)
            why = " (give the router the servers' admin key: --api-key)" if status in (401, 403) else ""
            logger.warning(
                "%s answers %s with %d; other routers cannot read its pool%s", instance.url, POOL_ROUTE, status, why
            )
        return False
