"""The tally of short batches that have left."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any

REASONS = ("depth", "window", "slack", "head_of_line", "preempt", "idle", "tokens")
WAIT_EDGES_MS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
"""Upper edges of the histogram of waits; the last bucket is above them."""


class Statistics:
    """Since the start."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._waits = [0] * (len(WAIT_EDGES_MS) + 1)
        self._depths: Counter[int] = Counter()
        self._late = 0

    def left(self, depth: int, waited_s: float, reason: str, late: int) -> None:
        """A batch of `depth` requests left after `waited_s`, for one of REASONS; `late` of them miss their deadline."""
        self._reasons[reason] += 1
        self._waits[bisect_left(WAIT_EDGES_MS, waited_s * 1e3)] += 1
        self._depths[1 << max(0, depth - 1).bit_length()] += 1
        self._late += late

    def status(self) -> dict[str, Any]:
        """For /laps_status (JSON-ready)."""
        edges = [*(f"<={e:g}" for e in WAIT_EDGES_MS), f">{WAIT_EDGES_MS[-1]:g}"]
        return {
            "dispatched": {r: self._reasons[r] for r in REASONS},
            "waits_ms": dict(zip(edges, self._waits, strict=True)),
            "depths": {f"<={d}": n for d, n in sorted(self._depths.items())},
            "late": self._late,
        }
