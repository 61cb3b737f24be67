"""What all routers agree on: a prefill server with LAPS keeps the pool it is in, and is told by compare and set.

Before a router moves anything it sets the record of one server that all of them agree on, the first by URL, if only
to what it is: whoever has read an older version there may not move. So of routers that decide at once one wins, and
the others see in any record that has grown that there was a move. No clock is in it, and no number but versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from laps_core.pools.controller import Move
from laps_core.protocol import POOL_ROUTE, Assignment, PoolRecord, read

from ..servers.instances import PrefillInstance
from ..servers.upstream import Sessions
from .choice import Pools

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
"""How long a server's answer is waited for (seconds)."""


class Records:
    """The records of the servers that keep one, as this router has read them last (``PrefillInstance.record``)."""

    def __init__(self, pools: Pools, sessions: Sessions, api_key: str | None) -> None:
        self._pools = pools
        self._sessions = sessions
        self._key = f"Bearer {api_key}" if api_key else None
        self._known: dict[str, PoolRecord] = {}
        """By URL, as they were when last looked at."""
        self._refused: set[str] = set()
        """Servers whose refusal has been logged."""

    def news(self) -> list[Move] | None:
        """What other routers have moved since the last call, as it was read; None where none has decided anything."""
        moved: list[Move] | None = None
        for i in self._pools.instances:
            record = i.record
            if record is None:
                continue
            before = self._known.get(i.url, record)
            self._known[i.url] = record
            # A server that has started again counts from 0.
            if 0 < before.version < record.version:
                moved = moved or []
                source, target = before.assignment, record.assignment
                if source and target and source != target:
                    moved.append(Move(i.url, source, target, time.monotonic(), "moved by another router"))
        return moved

    async def fill(self) -> None:
        """Tell servers that are in no pool yet the one that they have here. The first router that does so wins."""
        new = [i for i in self._pools.instances if i.healthy and i.record and not i.record.assignment]
        await asyncio.gather(*(self._set(i, i.pool) for i in new))

    async def carry_out(self, moves: Sequence[Move]) -> list[Move]:
        """Returns the moves that were made: none where another router was first. A stock server, or one that takes no
        record, moves for this router alone."""
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
        self._pools.apply(move)
        return True

    async def _set(self, instance: PrefillInstance, assignment: Assignment) -> bool:
        """Whether it was set; where another router was first, its record is taken."""
        record = instance.record or PoolRecord()
        body = {"assignment": assignment, "if_version": record.version}
        answer = await self._sessions.tell(instance, POOL_ROUTE, self._key, TIMEOUT_S, body)
        if answer is None:
            return False
        status, text = answer
        try:
            if status in (200, 409):
                made = read(text, PoolRecord)
                instance.take(made)
                if status == 200:
                    # What this router has done is no news to it.
                    self._known[instance.url] = made
                return status == 200
        except ValueError:
            pass
        if instance.url not in self._refused:
            self._refused.add(instance.url)
            why = " (give the router the servers' admin key: --api-key)" if status in (401, 403) else ""
            logger.warning(
                "%s answers %s with %d; other routers do not learn its pool%s", instance.url, POOL_ROUTE, status, why
            )
        return False
