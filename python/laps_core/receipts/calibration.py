"""Online calibration of predictions: an interval that holds a given share of outcomes, whatever the model's error."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable
from typing import Literal, NamedTuple

Side = Literal["below", "inside", "above"]
"""Position of an outcome against its interval."""
OUTSIDE = 0.1
"""Share of outcomes that may lie below the interval, and as many above it (0..1)."""
REMEMBERED = 512
"""Latest outcomes of one kind that count."""
FEWEST = 12
"""Outcomes of one kind before its own are used."""
STEP = 0.02
"""How far one outcome outside moves the level of that end (share of outcomes)."""
LEAST = 0.005
"""An end of the interval is never further out than this share of the outcomes."""


class Factors(NamedTuple):
    """Factors of a prediction for the low end, the median and the high end of the interval."""

    low: float
    middle: float
    high: float


START = Factors(0.5, 1.0, 2.5)
"""Before anything was measured."""


class _Outcomes:
    """Logarithms of outcome over prediction of one kind, and the levels of the two ends."""

    __slots__ = ("high", "last", "low", "ordered")

    def __init__(self) -> None:
        self.last: deque[float] = deque()
        self.ordered: list[float] = []
        self.low, self.high = OUTSIDE, 1.0 - OUTSIDE

    def add(self, log_ratio: float, side: Side) -> None:
        """Take in an outcome. `side`: of the interval that was quoted."""
        if len(self.last) >= REMEMBERED:
            del self.ordered[bisect_left(self.ordered, self.last.popleft())]
        self.last.append(log_ratio)
        insort(self.ordered, log_ratio)
        # An end through which too many leave moves out until as many leave as may: so the share holds in the long run
        # also while the outcomes drift (adaptive conformal inference).
        self.low += STEP * (OUTSIDE - (side == "below"))
        self.high -= STEP * (OUTSIDE - (side == "above"))
        self.low = min(max(self.low, LEAST), 0.5)
        self.high = min(max(self.high, 0.5), 1.0 - LEAST)

    def at(self, level: float) -> float:
        # Of n outcomes and the next one each is as likely to be the largest: so the place is one of n + 1.
        place = min(max(0.0, level * (len(self.ordered) + 1) - 1.0), len(self.ordered) - 1.0)
        below = int(place)
        above = min(below + 1, len(self.ordered) - 1)
        return self.ordered[below] + (place - below) * (self.ordered[above] - self.ordered[below])

    def factors(self) -> Factors:
        return Factors(*(math.exp(self.at(level)) for level in (self.low, 0.5, self.high)))


class Calibration:
    """Factors of each kind of prediction, learnt from outcomes; a kind that is new uses those of its family."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Hashable, ...], _Outcomes] = {}
        self._kept: dict[tuple[Hashable, ...], Factors] = {}

    def observe(self, family: Hashable, kind: Hashable, predicted_s: float, measured_s: float, side: Side) -> None:
        """Take in an outcome (seconds). A time that is not positive is ignored."""
        if not (0.0 < predicted_s < math.inf and 0.0 < measured_s < math.inf):
            return
        log_ratio = math.log(measured_s / predicted_s)
        for key in ((family,), (family, kind)):
            self._kinds.setdefault(key, _Outcomes()).add(log_ratio, side)
            self._kept.pop(key, None)

    def factors(self, family: Hashable, kind: Hashable) -> Factors:
        """Factors for a prediction of this kind."""
        for key in ((family, kind), (family,)):
            known = self._kinds.get(key)
            if known is not None and len(known.last) >= FEWEST:
                found = self._kept.get(key)
                if found is None:
                    found = self._kept[key] = known.factors()
                return found
        return START


def side_of(measured_s: float, low_s: float, high_s: float) -> Side:
    """Return the position of an outcome against its interval."""
    return "below" if measured_s < low_s else "above" if measured_s > high_s else "inside"
