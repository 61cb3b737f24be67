"""Events of an emulated device, in place of PyTorch's events for CPUs, which have always happened."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from laps_emulate.timeline import Timeline


class Event:
    """Happens once the device has done all work that it was given before the event was recorded, on any stream. Copies
    and samples that follow a step take no time of their own."""

    def __init__(self, timeline: Timeline, enable_timing: bool = False, **_: Any) -> None:
        self._timeline = timeline
        self.at_s = -math.inf
        """Time of the event (seconds of the timeline's clock); past if the event was never recorded, as on CUDA."""

    def record(self, stream: Any = None) -> None:
        """Record the event behind all work so far."""
        self.at_s = self._timeline.begin()

    def query(self) -> bool:
        return self._timeline.now() >= self.at_s

    def synchronize(self) -> None:
        """Wait until the event has happened."""
        self._timeline.wait(self.at_s)

    def wait(self, stream: Any = None) -> None:
        """Do nothing: all streams are one."""

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds from this event to `end`. Raises RuntimeError, as on CUDA, if either has not happened."""
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * (end.at_s - self.at_s)


class DeviceModule:
    """A module such as ``torch.cpu``, with the events of an emulated device."""

    def __init__(self, real: Any, timeline: Timeline) -> None:
        self._real, self._timeline = real, timeline
        self.Event = partial(Event, timeline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def synchronize(self, *_: Any) -> None:
        """Wait until the device has done all work that it was given."""
        self._timeline.wait(self._timeline.free)
