"""Sessions that clients name, and where each was served last: honoured before any prefix is looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from ..prompts.prefixes import Ask
from ..servers.instances import Place, PrefillInstance

MOST = 65_536
"""Sessions remembered; the one longest unused is forgotten."""
FAR = 2.0
"""A server is far behind, and left, where another would answer so many times sooner with nothing of the session."""


class SessionTable:
    """Name -> server or data-parallel rank."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def served(self, session: str | None, place: Place) -> None:
        """A request of this session goes there."""
        if session is None:
            return
        self._places[session] = place
        self._places.move_to_end(session)
        if len(self._places) > MOST:
            self._places.popitem(last=False)

    def clear(self) -> None:
        """The servers' caches are being flushed."""
        self._places.clear()

    def holder(self, ask: Ask, usable: Collection[PrefillInstance], now: float, threshold: int) -> Place | None:
        """Where the session of ``ask`` goes on; None: it has none, or that server is gone or far behind."""
        place = None if ask.session is None else self._places.get(ask.session)
        if place is None or place.server not in usable or place not in place.server.places:
            return None
        total = max(1, ask.total)
        new = ask.new(place.prefixes)
        here_s = place.outlook.cost_s(now, new, total - new, new <= threshold)
        anew_s = min(p.outlook.cost_s(now, total, 0, total <= threshold) for i in usable for p in i.places)
        return None if here_s > FAR * anew_s else place
