"""Statistics on how well an emulated device keeps the time of its profile."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

NEWEST = 4096
"""Number of newest steps that the figures cover."""


class Record:
    """Statistics of the steps of one device."""

    def __init__(self) -> None:
        self.steps = 0
        self.overrun = 0
        """Number of steps whose tiny model alone took longer than the profile allows."""
        self._lasted: deque[float] = deque(maxlen=NEWEST)
        self._host: deque[float] = deque(maxlen=NEWEST)

    def add(self, profile_s: float, lasted_s: float, model_s: float) -> None:
        """Record a step that lasted `lasted_s`, `model_s` of it in the tiny model, instead of `profile_s` (seconds)."""
        self.steps += 1
        self.overrun += model_s > profile_s
        if profile_s > 0.0 and lasted_s > 0.0:
            self._lasted.append(lasted_s / profile_s)
            self._host.append(model_s / lasted_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for the status (JSON-ready), None before the first step."""
        some = bool(self._lasted)
        median, p99 = np.quantile(self._lasted, (0.5, 0.99)).tolist() if some else (None, None)
        return {
            "steps": self.steps,
            "lasted_over_profile": {"median": median, "p99": p99},
            "overrun": self.overrun,
            "host_share": float(np.median(self._host)) if some else None,
        }
