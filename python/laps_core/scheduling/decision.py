"""What the window decides, and the tally of it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Predict = Callable[[Sequence[tuple[int, int]]], "float | None"]
"""(new, history) tokens of each request of a step -> seconds, or None when nothing is known."""

REASONS = ("depth", "window", "slack", "head_of_line", "preempt", "idle", "tokens")
WAIT_EDGES_MS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
"""Upper edges of the histogram of waits; the last bucket is above them."""


class Dispatch(NamedTuple):
    """Run these now."""

    picked: tuple[int, ...]
    """Indices into the requests given, in the order to run them."""
    reason: str
    """One of REASONS."""
    waited_s: float = 0.0
    """How long the window held the batch (not the queueing before it)."""
    late: int = 0
    """How many of those picked can no longer make their deadline."""


class Wait(NamedTuple):
    """Run no short batch before ``until_s``, unless something arrives: then decide again."""

    until_s: float
    """Infinite when nothing waits."""
    reason: str
    """What the wait is for: "returning", "burst", "fixed", or "empty"."""


Decision = Dispatch | Wait


class Hold(NamedTuple):
    """What the window last waited for."""

    depth: int
    """Requests that were there."""
    expected: float
    saving_s: float
    returning: bool


class Tally:
    """Short batches that have left, since the start."""

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
