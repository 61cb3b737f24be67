"""When an emulated device is busy, and waiting for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SPIN_S = 2e-4
"""A sleep ends late; so the last of a wait is spent looking at the clock, but no more: servers share cores."""


class Timeline:
    """One device, one thing after another. Seconds of one clock."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.now, self._sleep = clock, sleep
        self.free = -math.inf
        """When it has done all that it was given."""

    def begin(self) -> float:
        """When something that is launched now would begin."""
        return max(self.now(), self.free)

    def book(self, launched: float, seconds: float, least: float = -math.inf) -> float:
        """Give it work that was launched from `launched` until `least`, before which it does not end; when it ends."""
        self.free = max(max(launched, self.free) + seconds, least)
        return self.free

    def wait(self, until: float) -> None:
        """Come back at `until`; at once if that is past."""
        left = until - self.now()
        if left > SPIN_S:
            self._sleep(left - SPIN_S)
        while self.now() < until:
            pass
