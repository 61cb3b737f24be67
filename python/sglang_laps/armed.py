"""Base class of what runs one forward pass in slices; the request for it comes just before the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

Pause = Callable[[float], bool]
"""Called between two slices with the number of layers that are left, not always a whole one; returns True if anything
else ran on the device."""


class Order(NamedTuple):
    """How the next pass is cut."""

    layers: float
    """Size of a slice; less than one: of operators."""
    pause: Pause
    parts: int = 0
    """So many slices of as many layers each, the same on every rank that runs the pass; 0 = by ``layers``."""


class Abandoned(Exception):
    """Raised by a pause: nobody waits for the pass any more, and it is to end there."""


class Armed:
    """The part that every ``slices.Cutter`` shares."""

    _armed: Order | None = None

    @property
    def abandons(self) -> bool:
        """Return True if a pass ends where its pause raises ``Abandoned``."""
        return False

    @contextmanager
    def cut(self, layers: float, pause: Pause, parts: int = 0) -> Iterator[None]:
        """Run the next forward pass as ``Order`` says; `pause` is called between two slices."""
        self._armed = Order(layers, pause, parts)
        try:
            yield
        finally:
            self._armed = None

    def disarm(self) -> Order | None:
        """Return how this pass is cut; None if it runs as a whole. Passes in its pauses come here, too, and are not
        cut."""
        armed, self._armed = self._armed, None
        return armed
