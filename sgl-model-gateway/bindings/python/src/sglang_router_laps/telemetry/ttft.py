"""Time to first token by class, over a sliding window."""

from __future__ import annotations

from collections import deque
from typing import Any

from laps_core.pools.pressure import POOLS, Pool, quantile

SAMPLES = 4096
"""Samples kept per class, however long the window is."""


class TtftWindow:
    """The latest first-token times (seconds) of each class. Time is an argument (seconds)."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: dict[Pool, deque[tuple[float, float]]] = {p: deque(maxlen=SAMPLES) for p in POOLS}

    def add(self, now: float, length_class: Pool, seconds: float) -> None:
        """Note one first token."""
        self._samples[length_class].append((now, seconds))

    def since(self, start: float, length_class: Pool) -> list[float]:
        """Samples not older than ``start``, newest first."""
        found = []
        for at, seconds in reversed(self._samples[length_class]):
            if at < start:
                break
            found.append(seconds)
        return found

    def quantiles_ms(self, now: float, window_s: float | None = None) -> dict[str, dict[str, Any]]:
        """Per class: number of samples, and p50, p90, p99 (ms; None without samples)."""
        start = now - (window_s or self._window_s)
        result: dict[str, dict[str, Any]] = {}
        for p in POOLS:
            values = self.since(start, p)
            result[p] = {"count": len(values)}
            for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                result[p][name] = round(quantile(values, q) * 1e3, 3) if values else None
        return result
