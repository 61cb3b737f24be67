"""Base class of what runs one forward pass in slices; the request for it comes just before the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Pause = Callable[[float], bool]
"""Called between two slices with the number of layers that are left, not always a whole one; returns True if anything
else ran on the device."""


class Abandoned(Exception):
    """Raised by a pause: nobody waits for the pass any more, and it is to end there."""


class Armed:
    """The part that every ``slices.Cutter`` shares."""

    abandons = False
    """A pass ends where its pause raises ``Abandoned``."""
    _armed: tuple[float, Pause] | None = None

    @contextmanager
    def cut(self, layers: float, pause: Pause) -> Iterator[None]:
        """Run the next forward pass in slices of `layers` (less than one: of operators); `pause` is called between
        them."""
        self._armed = layers, pause
        try:
            yield
        finally:
            self._armed = None

    def disarm(self) -> tuple[float, Pause] | None:
        """Return slice size and pause for this pass; None if it runs as a whole. Passes in its pauses come here, too,
        and are not cut."""
        armed, self._armed = self._armed, None
        return armed
