"""Hold on memory for a long request whose turn has come but that finds too little memory to start."""

from __future__ import annotations

import math

from laps_core.length import LONG, SHORT, ClassName

HOLD_S = 5.0
"""Longest time for which other requests stand back (seconds). Running work drains faster, transfers included, unless a
decode server does not fetch its KV, which can last minutes."""
REST = 3.0
"""Time for which other requests then go on, in multiples of the time for which they stood back."""


class MemoryHold:
    """Hold on all requests that would take memory from a long request that was tried first and did not fit.

    Each new batch takes the memory that the batch before it gave back, so a long request that needs much memory would
    never start. If no batch is built, the long request starts once the running work that holds memory has drained.
    Short requests hold little memory: while other long work drains, only long requests stand back.

    Bound: once other work cannot permanently hold the memory that the request needs, the request starts after at most
    2 (1 + REST) HOLD_S plus the time in which the short batches in flight drain, if that time is below HOLD_S. Of any
    time, other requests stand back for at most 1 / (1 + REST), plus HOLD_S.
    """

    def __init__(self) -> None:
        self._begun_s: float | None = None
        """Start of the current hold; None without a hold."""
        self._again_s = -math.inf
        """Time until which other requests go on."""
        self._vain = False
        """True after a hold in vain, until the end of the next hold."""
        self._tried = False
        """True if the long request was tried after all draining work had ended."""

    def choose_held_classes(self, now: float, *, lacking: bool, drains: ClassName | None) -> tuple[ClassName, ...]:
        """Return the classes of which no other request may start. Call in every round.

        lacking: the long request, tried first, did not fit last time. drains: class of the other work that will free
        memory, LONG if both classes will; None if no work will.
        """
        begun_s = self._begun_s
        over = begun_s is not None and now >= begun_s + HOLD_S
        if begun_s is not None and (over or not lacking):
            self._begun_s, self._again_s = None, now + REST * min(now - begun_s, HOLD_S)
            self._vain = over and not self._vain
        if not lacking:
            self._tried = False
            return ()
        if drains is None:
            # The request is tried once after everything has drained. If it still lacks memory, other requests may have
            # to run to free some, for example those of a session.
            tried, self._tried = self._tried, True
            return () if tried else (LONG,)
        self._tried = False
        if now < self._again_s:
            return ()
        self._begun_s = now if self._begun_s is None else self._begun_s
        # Long work may never drain: then short requests stand back, too, in the next hold.
        return (LONG,) if drains == LONG and not self._vain else (LONG, SHORT)
