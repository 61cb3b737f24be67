"""Busy share of a device over the last seconds."""

from __future__ import annotations

import math

HORIZON_S = 5.0
"""Time constant of the busy share (seconds)."""


class BusyMeter:
    """Exponentially weighted busy share of one device (0..1)."""

    def __init__(self) -> None:
        self._share = 0.0
        self._at = -math.inf

    def add(self, begin: float, end: float) -> None:
        """Record a busy interval (seconds). Intervals come in order and do not overlap."""
        keep = math.exp(-max(0.0, end - begin) / HORIZON_S)
        self._share = self.share(begin) * keep + (1.0 - keep)
        self._at = end

    def share(self, now: float) -> float:
        """Return the busy share at `now` (seconds). Does not change the meter."""
        return self._share * math.exp(-max(0.0, now - self._at) / HORIZON_S)
