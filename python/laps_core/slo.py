"""Deadlines for the first token: attainment by class, and how far recent requests exceeded their deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_HALF_LIFE_S = 10.0

OVERSHOOT_MAX = 4.0
"""Largest overshoot counted for one request (in deadlines). Without this cap one client that asks for 0.1 ms would
outweigh hundreds of requests in the mean that controls the pools."""


def overshoot(ttft_s: float, slo_s: float) -> float:
    """Return by how many deadlines a first token was late: 0 if in time, at most OVERSHOOT_MAX (ratio).

    ``slo_s`` (seconds) must be a deadline that ``deadline.valid`` accepts.
    """
    return min(max(0.0, ttft_s / slo_s - 1.0), OVERSHOOT_MAX)


@dataclass(slots=True)
class _Tally:
    met: int = 0
    missed: int = 0
    weight: float = 0.0
    """Number of recent requests, decayed with their age."""
    overshoot: float = 0.0
    """Sum of the relative overshoots of recent requests, decayed in the same way."""
    seen_s: float = -math.inf

    def recent(self, now: float) -> tuple[float, float]:
        """Return both sums, decayed to `now`."""
        kept = math.exp2(-max(0.0, now - self.seen_s) / _HALF_LIFE_S)
        return self.weight * kept, self.overshoot * kept


class SloLedger:
    """Counts by class name. Requests without a deadline are not counted."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def record(self, now: float, kind: str, ttft_s: float, slo_s: float | None) -> None:
        """Record the TTFT of a request of class ``kind``; ``slo_s``: its deadline, if any (seconds, > 0)."""
        if slo_s is None:
            return
        tally = self._tallies.setdefault(kind, _Tally())
        over = overshoot(ttft_s, slo_s)
        tally.missed += over > 0.0
        tally.met += over == 0.0
        weight, overshoots = tally.recent(now)
        tally.weight, tally.overshoot, tally.seen_s = weight + 1.0, overshoots + over, max(now, tally.seen_s)

    def deviation(self, now: float, kind: str | None = None) -> float:
        """Return the mean relative overshoot of recent requests (in time: 0; 0.5: late by half a deadline), at most
        OVERSHOOT_MAX. Decays with a half-life of 10 s, to 0 without requests. Does not change the ledger."""
        recent = [tally.recent(now) for name, tally in self._tallies.items() if kind in (None, name)]
        return sum(total for _, total in recent) / max(sum(weight for weight, _ in recent), 1.0)

    def status(self, now: float) -> dict[str, Any]:
        """Return class -> counts since the start, attainment (share in time, 0..1) and deviation (JSON-ready)."""
        return {
            kind: {
                "met": t.met,
                "missed": t.missed,
                "attainment": t.met / (t.met + t.missed),
                "deviation": self.deviation(now, kind),
            }
            for kind, t in sorted(self._tallies.items())
        }
