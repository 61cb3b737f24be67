"""How one forward pass is run in slices; the request for it comes just before the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

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


class Cutter(Protocol):
    """Runs passes of one model runner in slices."""

    layers: int
    """Layers of the model."""
    operators: int
    """At how many points of a layer a pass can be paused, blocks of rows aside."""

    @property
    def abandons(self) -> bool:
        """Return True if a pass ends where its pause raises ``Abandoned``; its output is then no result."""
        ...

    @property
    def launch_s(self) -> float:
        """Host time (seconds) to launch a whole pass in slices, its pauses included, at its fastest; 0 if unknown, or
        where launching is computing."""
        ...

    @property
    def pause_s(self) -> float:
        """Time (seconds) that a pause in which nothing runs costs a pass; 0 if unknown, or where the device computes
        meanwhile."""
        ...

    def cut(self, layers: float, pause: Pause, parts: int = 0) -> AbstractContextManager[None]:
        """Run the next forward pass as ``Order`` says; `pause` is called between two slices."""
        ...


class Armed:
    """The part that every ``Cutter`` shares."""

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
