"""Busy times of an emulated device, and waits for the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SPIN_S = 2e-4
"""Longest end of a wait that is spent reading the clock (seconds): a sleep ends late, but servers share cores."""


class Timeline:
    """One device, which does its work in order. Times are seconds of one clock."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.now, self._sleep = clock, sleep
        self.free = -math.inf
        """Time when the device has done all work that it was given."""

    def begin(self) -> float:
        """Return the time when work that is launched now would start."""
        return max(self.now(), self.free)

    def book(self, launched: float, seconds: float, least: float = -math.inf) -> float:
        """Add work that is launched from `launched` until `least`, before which it cannot end. Return its end."""
        self.free = max(max(launched, self.free) + seconds, least)
        return self.free

    def wait(self, until: float) -> None:
        """Return at `until`; at once if that time is past."""
        left = until - self.now()
        if left > SPIN_S:
            self._sleep(left - SPIN_S)
        while self.now() < until:
            pass
