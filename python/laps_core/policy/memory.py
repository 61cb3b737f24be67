"""Memory for a long request that is owed its turn and cannot start for want of it."""

from __future__ import annotations

import math

from laps_core.length import LONG, SHORT, ClassName

HOLD_S = 5.0
"""Longest time (seconds) for which others stand back. What runs drains in less, transfers included, unless a decode
server does not fetch what was computed for it; that may last minutes."""
REST = 3.0
"""Times as long as they stood back others then go on."""


class MemoryHold:
    """Which requests leave memory alone for a long request that was tried first and did not fit.

    Each batch that is built takes again what the one before it gave back, so a long request that needs much of the
    memory would never start. With none built, it starts once the running work that holds memory drains. Short requests
    hold little: while other long work drains, only long requests stand back.

    Bound: once what other work may hold for good leaves enough, it starts after at most 2 (1 + REST) HOLD_S and the
    time that the short batches in flight take to drain; for this, that time must be below HOLD_S. Of any time, others
    stand back for 1 / (1 + REST) at most, and HOLD_S.
    """

    def __init__(self) -> None:
        self._begun_s: float | None = None
        """Since when others stand back."""
        self._again_s = -math.inf
        """Others go on until then."""
        self._vain = False
        """True if they stood back in vain last time."""
        self._tried = False
        """True if the request was tried after the last work had drained."""

    def stand_back(self, now: float, *, lacking: bool, drains: ClassName | None) -> tuple[ClassName, ...]:
        """Return the classes of which nothing else starts. Ask in every round.

        lacking: the long request, tried first, did not fit last time. drains: class of the other work that will give
        memory back, long before short; None = there is none.
        """
        begun_s = self._begun_s
        over = begun_s is not None and now >= begun_s + HOLD_S
        if begun_s is not None and (over or not lacking):
            self._begun_s, self._again_s = None, now + REST * (now - begun_s)
            self._vain = over and not self._vain
        if not lacking:
            self._tried = False
            return ()
        if drains is None:
            # It is tried once with all that drains gone. Then it may be others who free memory by their turn: those of
            # a session, say.
            tried, self._tried = self._tried, True
            return () if tried else (LONG,)
        self._tried = False
        if now < self._again_s:
            return ()
        self._begun_s = now if self._begun_s is None else self._begun_s
        # It may never drain: then short requests stand back, too, by the next turn.
        return (LONG,) if drains == LONG and not self._vain else (LONG, SHORT)
