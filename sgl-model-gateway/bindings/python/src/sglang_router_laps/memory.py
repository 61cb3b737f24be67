"""Memory that the bodies of all requests take together."""

from __future__ import annotations

from dataclasses import dataclass

from .queue import TurnedAway

LEAST = 256 << 20
"""Bodies may always take so much (bytes)."""
LARGEST = 2
"""So many bodies of --max-payload-size may be there at a time."""
HOLD = "laps.hold"
"""Where in a scope its Hold stands."""


class Budget:
    """Bytes of bodies in this process, from their arrival until no server needs them any more."""

    def __init__(self, max_payload: int) -> None:
        self.most = max(LEAST, LARGEST * max_payload)
        self.taken = 0


@dataclass(slots=True)
class Hold:
    """Share of one request in the budget. It ends once."""

    budget: Budget
    unread: bool = False
    """Of its body not all has been read."""
    _taken: int = 0

    def take(self, size: int) -> None:
        """Add ``size`` bytes. Raises TurnedAway where all requests together have no room for them."""
        budget = self.budget
        if budget.taken + size > budget.most:
            why = f"the bodies of the requests in flight take {budget.taken} of {budget.most} bytes"
            raise TurnedAway(429, "overloaded", why, 1)
        budget.taken += size
        self._taken += size

    def end(self) -> None:
        """Give all of it back."""
        self.budget.taken -= self._taken
        self._taken = 0
