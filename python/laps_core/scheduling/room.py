"""Memory for a long request that is owed its turn and cannot start for want of it."""

from __future__ import annotations

ROOM_S = 5.0
"""Longest time (seconds) that short requests stand still for it. What runs drains in less, transfers included, unless a
decode server does not take what was computed for it; that may last minutes."""


class Room:
    """Whether short requests leave memory alone for a long request that was tried first and did not fit.

    Each short batch that is built takes again what the one before it gave back, so a long request that needs much of
    the memory would never start. With none built, it starts once the running work that holds memory drains.

    Bound: once what other work may hold for good leaves it room, it starts after at most ROOM_S and the time that
    the short batches in flight take to drain; for this, that time must be below ROOM_S. Of any time, short requests
    stand still for half at most, beyond the first ROOM_S.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None

    def kept(self, now: float, *, lacking: bool) -> bool:
        """Whether short requests stand still if the long one, tried first, does not fit. `lacking`: it did not last
        time either. Ask in every round in which it is owed, and with `lacking` False where it is not."""
        if not lacking:
            self._since_s = None
            return True
        if self._since_s is None:
            self._since_s = now
        return (now - self._since_s) % (2.0 * ROOM_S) < ROOM_S
