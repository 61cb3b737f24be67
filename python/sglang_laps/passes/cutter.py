"""Interface to run one forward pass in slices, which the caller orders just before the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Pause = Callable[[float], bool]
"""Function called between two slices with the number of layers left, which can be a fraction. Returns True if another
batch ran on the device."""


class SliceOrder(NamedTuple):
    """Division of the next pass into slices."""

    layers: float
    """Layers of a slice; less than one: the slice is some operators of a layer."""
    pause: Pause
    parts: int = 0
    """Number of slices, of about equal layers, the same on every rank that runs the pass; 0 = slices of ``layers``."""


class Abandoned(Exception):
    """Raised by a pause to end the pass there, because all of its requests were aborted."""


class Cutter:
    """Base class of an object that runs passes of one model runner in slices."""

    layers: int
    operators: int
    """Pause points in a layer, without those between blocks of rows."""
    launch_s = pause_s = 0.0
    """Shortest host time to launch a whole pass in slices, pauses included (0 if the host computes the pass while it
    launches), and time by which a pause without work delays a pass (0 if the device computes meanwhile); seconds, 0 if
    unknown."""
    _armed: SliceOrder | None = None

    @property
    def abandons(self) -> bool:
        """Return True if a pass ends when its pause raises ``Abandoned``; the output is then not valid."""
        return False

    @contextmanager
    def cut(self, layers: float, pause: Pause, parts: int = 0) -> Iterator[None]:
        """Run the next forward pass as ``SliceOrder`` says; `pause` is called between two slices."""
        self._armed = SliceOrder(layers, pause, parts)
        try:
            yield
        finally:
            self._armed = None

    def disarm(self) -> SliceOrder | None:
        """Take the order for the pass that starts now; None = run the pass whole. Passes that run in the pauses of that
        pass call this, too, and get None."""
        armed, self._armed = self._armed, None
        return armed


class StandIn(Cutter):
    """A device that replaces the real device of a scheduler, and runs passes in slices itself."""

    waits: bool
    """True if a pass has ended when its call returns."""

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of the device's Prometheus series."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """Return the entry "emulated" of a server's status, ready for JSON."""
        raise NotImplementedError


def device_of(scheduler: Any) -> StandIn | None:
    """Return the stand-in that another package has put in place of this scheduler's device; None if it is real."""
    return getattr(scheduler, "laps_emulated", None)


def stand_in_status(scheduler: Any) -> dict[str, Any]:
    device = device_of(scheduler)
    return {} if device is None else {"emulated": device.status()}
