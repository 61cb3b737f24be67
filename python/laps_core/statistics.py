"""Counters of a scheduler's decisions, for the status."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from typing import Any

REASONS = ("depth", "window", "slack", "preempt", "idle", "tokens")
TOKEN_TIMES = 1024
"""Decode steps whose times between tokens are remembered."""
WAIT_EDGES_MS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
"""Upper edges of the histogram of holds; one more bucket counts longer holds."""


class ShortBatches:
    """Statistics of short batches dispatched since the start."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._waits = [0] * (len(WAIT_EDGES_MS) + 1)
        self._depths: Counter[int] = Counter()
        self._late = 0

    def record_batch(self, depth: int, waited_s: float, reason: str, late: int) -> None:
        """Count a batch of `depth` requests that left after `waited_s`, for one of REASONS; `late` miss deadlines."""
        self._reasons[reason] += 1
        self._waits[bisect_left(WAIT_EDGES_MS, waited_s * 1e3)] += 1
        self._depths[1 << max(0, depth - 1).bit_length()] += 1
        self._late += late

    def status(self) -> dict[str, Any]:
        edges = [*(f"<={e:g}" for e in WAIT_EDGES_MS), f">{WAIT_EDGES_MS[-1]:g}"]
        return {
            "dispatched": {r: self._reasons[r] for r in REASONS},
            "waits_ms": dict(zip(edges, self._waits, strict=True)),
            "depths": {f"<={d}": n for d, n in sorted(self._depths.items())},
            "late": self._late,
        }


class DecodeSteps:
    """Statistics of decode steps since the start."""

    def __init__(self) -> None:
        self.steps = self.within = self.carried = 0
        """Numbers of steps: all; in pauses of a prefill batch; as rows of a prefill batch."""
        self.busy_s = 0.0
        """Device time of the steps that were not rows of a prefill batch (seconds)."""
        self._gaps: deque[tuple[float, int]] = deque(maxlen=TOKEN_TIMES)

    def record_step(self, gap_s: float, streams: int, *, within: bool, own_s: float | None) -> None:
        """Count a step of `streams` streams that ended `gap_s` after the previous step (seconds; infinite for the
        first). `within`: in a pause. `own_s`: device time; None = the step was rows of a prefill batch."""
        if 0.0 < gap_s < math.inf:
            self._gaps.append((gap_s, streams))
        self.steps += 1
        self.within += within
        self.carried += own_s is None
        self.busy_s += own_s or 0.0

    def gap_s(self, share: float) -> float | None:
        """Return a quantile of the latest times between tokens (seconds), each counted once per stream; None if no
        time is known. `share`: 0..1."""
        gaps = sorted(self._gaps)
        left = share * sum(n for _, n in gaps)
        for gap, n in gaps:
            left -= n
            if left <= 0:
                return gap
        return None

    def status(self) -> dict[str, Any]:
        ms = {name: self.gap_s(share) for name, share in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))}
        return {
            "steps": self.steps,
            "steps_in_pauses": self.within,
            "steps_carried": self.carried,
            "busy_s": self.busy_s,
            "tbt_ms": {name: None if s is None else 1e3 * s for name, s in ms.items()},
        }
