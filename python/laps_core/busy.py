"""How busy a device was over the last seconds."""

from __future__ import annotations

import math


class BusyMeter:
    """Exponentially weighted busy share of one device (0..1); `horizon_s` is the time constant in seconds."""

    def __init__(self, horizon_s: float = 5.0) -> None:
        self._horizon_s = horizon_s
        self._share = 0.0
        self._at: float | None = None

    def add(self, begin: float, end: float) -> None:
        """Note a busy interval; intervals come in order and do not overlap (seconds)."""
        keep = math.exp(-max(0.0, end - begin) / self._horizon_s)
        self._share = self.share(begin) * keep + (1.0 - keep)
        self._at = end

    def share(self, now: float) -> float:
        """Busy share as of `now` (seconds). Reading changes nothing."""
        if self._at is None:
            return self._share
        return self._share * math.exp(-max(0.0, now - self._at) / self._horizon_s)
