"""Who met the deadline for the first token: attainment by class, and how far off the recent ones were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_HALF_LIFE_S = 10.0

OVERSHOOT_MAX = 4.0
"""What one request counts at most (deadlines too late): beyond, it is simply late. Without a cap one client that asks
for 0.1 ms would outweigh hundreds of requests in the mean that steers the pools."""


@dataclass(slots=True)
class _Tally:
    met: int = 0
    missed: int = 0
    weight: float = 0.0
    """Recent requests, older ones fading."""
    overshoot: float = 0.0
    """Their relative overshoots, fading alike."""
    seen_s: float = -math.inf

    def kept(self, now: float) -> float:
        """What is left by now of the sums (0..1)."""
        return math.exp2(-max(0.0, now - self.seen_s) / _HALF_LIFE_S)

    def add(self, now: float, overshoot: float) -> None:
        kept = self.kept(now)
        self.weight = self.weight * kept + 1.0
        self.overshoot = self.overshoot * kept + overshoot
        self.seen_s = max(now, self.seen_s)


def overshoot(ttft_s: float, slo_s: float) -> float:
    """By how many deadlines a first token came too late: 0 in time, at most OVERSHOOT_MAX (ratio).

    ``slo_s`` (seconds) is a deadline that ``deadline.valid`` has let through.
    """
    return min(max(0.0, ttft_s / slo_s - 1.0), OVERSHOOT_MAX)


class SloLedger:
    """Counts by class name. Requests without an SLO are not counted."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def record(self, now: float, kind: str, ttft_s: float, slo_s: float | None) -> None:
        """A request of class ``kind`` had its first token after ``ttft_s``; ``slo_s`` was allowed (seconds, > 0)."""
        if slo_s is None:
            return
        tally = self._tallies.setdefault(kind, _Tally())
        over = overshoot(ttft_s, slo_s)
        if over > 0.0:
            tally.missed += 1
        else:
            tally.met += 1
        tally.add(now, over)

    def attainment(self, kind: str | None = None) -> float | None:
        """Share of requests within their SLO since the start (0..1), of one class or all; None = none counted."""
        tallies = self._of(kind)
        met, missed = sum(t.met for t in tallies), sum(t.missed for t in tallies)
        return met / (met + missed) if met + missed else None

    def misses(self, kind: str | None = None) -> int:
        """Requests over their SLO since the start."""
        return sum(t.missed for t in self._of(kind))

    def deviation(self, now: float, kind: str | None = None) -> float:
        """Mean relative overshoot of recent requests, those within their SLO counting 0: 0.5 is half an SLO too late.

        At most OVERSHOOT_MAX. Fades with a half-life of 10 s, to 0 when nothing comes any more; asking changes nothing.
        """
        weight = total = 0.0
        for tally in self._of(kind):
            kept = tally.kept(now)
            weight += tally.weight * kept
            total += tally.overshoot * kept
        return total / max(weight, 1.0)

    def status(self, now: float) -> dict[str, Any]:
        """Class -> counts, attainment and deviation (JSON-ready)."""
        return {
            kind: {
                "met": t.met,
                "missed": t.missed,
                "attainment": self.attainment(kind),
                "deviation": self.deviation(now, kind),
            }
            for kind, t in sorted(self._tallies.items())
        }

    def _of(self, kind: str | None) -> list[_Tally]:
        if kind is None:
            return list(self._tallies.values())
        return [self._tallies[kind]] if kind in self._tallies else []
