"""Memory budget shared by the bodies of all requests."""

from __future__ import annotations

from dataclasses import dataclass

from .queue import TurnedAway

LEAST = 256 << 20
"""Least budget, even for a small --max-payload-size (bytes)."""
LARGEST = 2
"""Number of bodies of --max-payload-size that fit into the budget together."""
HOLD = "laps.hold"
"""Key of a request's Hold in its ASGI scope."""


class Budget:
    """Bytes of request bodies in this process: the limit, and those that have arrived and are still needed."""

    def __init__(self, max_payload: int) -> None:
        self.limit = max(LEAST, LARGEST * max_payload)
        self.used = 0


@dataclass(slots=True)
class Hold:
    """Bytes that one request takes from the budget, released once."""

    budget: Budget
    unread: bool = False
    """True while the body has not been read to the end."""
    _used: int = 0

    def take(self, size: int) -> None:
        """Add ``size`` bytes. Raises TurnedAway if all requests together would exceed the budget."""
        budget = self.budget
        if budget.used + size > budget.limit:
            why = f"the bodies of the requests in flight take {budget.used} of {budget.limit} bytes"
            raise TurnedAway(429, "overloaded", why, 1)
        budget.used += size
        self._used += size

    def end(self) -> None:
        """Release the whole share."""
        self.budget.used -= self._used
        self._used = 0
