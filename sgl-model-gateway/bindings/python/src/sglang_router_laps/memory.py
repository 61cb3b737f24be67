"""Memory budget shared by the bodies of all requests."""

from __future__ import annotations

from dataclasses import dataclass

from .queue import TurnedAway

LEAST = 256 << 20
"""Least budget, even for a small --max-payload-size (bytes)."""
LARGEST = 2
"""Bodies of --max-payload-size that the budget holds at a time."""
HOLD = "laps.hold"
"""Key of a request's Hold in its ASGI scope."""


class Budget:
    """Bytes of bodies in this process, from their arrival until no server needs them any more."""

    def __init__(self, max_payload: int) -> None:
        self.most = max(LEAST, LARGEST * max_payload)
        self.taken = 0


@dataclass(slots=True)
class Hold:
    """Share of one request in the budget. It is released once."""

    budget: Budget
    unread: bool = False
    """True while the body has not been read to the end."""
    _taken: int = 0

    def take(self, size: int) -> None:
        """Add ``size`` bytes. Raises TurnedAway if all requests together would exceed the budget."""
        budget = self.budget
        if budget.taken + size > budget.most:
            why = f"the bodies of the requests in flight take {budget.taken} of {budget.most} bytes"
            raise TurnedAway(429, "overloaded", why, 1)
        budget.taken += size
        self._taken += size

    def end(self) -> None:
        """Release the whole share."""
        self.budget.taken -= self._taken
        self._taken = 0
