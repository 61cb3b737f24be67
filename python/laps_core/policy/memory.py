"""Memory for a long request that is owed its turn and cannot start for want of it."""

from __future__ import annotations

from laps_core.length import LONG, SHORT, ClassName

HOLD_S = 5.0
"""Time (seconds) for which others go on, then stand back, in turn. What runs drains in less, transfers included, unless
a decode server does not fetch what was computed for it; that may last minutes."""


class MemoryHold:
    """Which requests leave memory alone for a long request that was tried first and did not fit.

    Each batch that is built takes again what the one before it gave back, so a long request that needs much of the
    memory would never start. With none built, it starts once the running work that holds memory drains. Short requests
    hold little: while other long work drains, only long requests stand back.

    Bound: once what other work may hold for good leaves enough, it starts after at most 4 HOLD_S and the time that the
    short batches in flight take to drain; for this, that time must be below HOLD_S. Of any time, others stand back for
    half at most.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._tried = False
        """True if the request was tried after the last work had drained."""

    def stand_back(self, now: float, *, lacking: bool, drains: ClassName | None) -> tuple[ClassName, ...]:
        """Return the classes of which nothing else starts. Ask in every round.

        lacking: the long request, tried first, did not fit last time; False where none is owed its turn. drains: class
        of the other work that will give memory back, long before short; None = there is none.
        """
        if not lacking:
            self._since_s, self._tried = None, False
            return ()
        if self._since_s is None:
            self._since_s = now
        if drains is None:
            # It is tried once with all that drains gone. Then it may be others who free memory by their turn: those of
            # a session, say.
            tried, self._tried = self._tried, True
            return () if tried else (LONG,)
        self._tried = False
        turn = int((now - self._since_s) / HOLD_S) % 4
        if turn % 2 == 0:
            return ()
        # It may never drain: then short requests stand back by the fourth turn.
        return (LONG,) if drains == LONG and turn == 1 else (LONG, SHORT)
