"""Sessions named by clients, and the last server of each. The router looks up a session before any prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from laps_core.pools.prefill import Place, PrefillInstance
from laps_core.pools.prefixes import Ask

MOST = 65_536
"""Most sessions remembered; the least recently used one is forgotten."""
FAR = 2.0
"""Ratio of predicted times above which a session leaves its server for another that has nothing of it cached."""


class SessionTable:
    """Map from the name of a session to its server or data-parallel rank."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def served(self, session: str | None, place: Place) -> None:
        if session is None:
            return
        self._places[session] = place
        self._places.move_to_end(session)
        if len(self._places) > MOST:
            self._places.popitem(last=False)

    def clear(self) -> None:
        """Forget all sessions: the servers' caches are being flushed."""
        self._places.clear()

    def holder(self, ask: Ask, usable: Collection[PrefillInstance], now: float, threshold: int) -> Place | None:
        """Return the place where the session of ``ask`` continues; None if ``ask`` has no known session, or if its
        place is gone or far slower than another."""
        place = None if ask.session is None else self._places.get(ask.session)
        if place is None or place.server not in usable or place not in place.server.places:
            return None
        total = max(1, ask.total)
        new = ask.new(place.prefixes)
        here_s = place.outlook.cost_s(now, new, total - new, new <= threshold)
        anew_s = min(p.outlook.cost_s(now, total, 0, total <= threshold) for i in usable for p in i.places)
        return None if here_s > FAR * anew_s else place
