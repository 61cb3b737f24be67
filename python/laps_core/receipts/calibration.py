"""Online calibration of predictions: an interval that holds a given share of outcomes, despite errors of the model."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable
from typing import Literal, NamedTuple

Side = Literal["below", "inside", "above"]
"""Position of an outcome relative to its interval."""
OUTSIDE = 0.1
"""Target share of outcomes below the interval, and target share above it (0..1)."""
REMEMBERED = 512
"""Latest outcomes of one kind that count."""
FEWEST = 12
"""Outcomes of one kind that must be known before they are used."""
STEP = 0.02
"""Step size with which each outcome moves the levels of both ends (share of outcomes)."""
LEAST = 0.005
"""Least level of the low end; the high end stays below 1 by at least this much (share of outcomes)."""


class Factors(NamedTuple):
    """Factors of a prediction for the low end, the median and the high end of the interval."""

    low: float
    middle: float
    high: float


START = Factors(0.5, 1.0, 2.5)
"""Factors used before FEWEST outcomes are known."""


class _Outcomes:
    """Logarithms of outcome / prediction of one kind, and the levels of the two ends."""

    __slots__ = ("high", "last", "low", "ordered")

    def __init__(self) -> None:
        self.last: deque[float] = deque()
        self.ordered: list[float] = []
        self.low, self.high = OUTSIDE, 1.0 - OUTSIDE

    def add(self, log_ratio: float, side: Side) -> None:
        """Add an outcome. `side`: position relative to the quoted interval."""
        if len(self.last) >= REMEMBERED:
            del self.ordered[bisect_left(self.ordered, self.last.popleft())]
        self.last.append(log_ratio)
        insort(self.ordered, log_ratio)
        # If too many outcomes lie beyond an end, that end moves out, so that the target share holds in the long run
        # even if outcomes drift (adaptive conformal inference).
        self.low += STEP * (OUTSIDE - (side == "below"))
        self.high -= STEP * (OUTSIDE - (side == "above"))
        self.low = min(max(self.low, LEAST), 0.5)
        self.high = min(max(self.high, 0.5), 1.0 - LEAST)

    def at(self, level: float) -> float:
        # Among n outcomes and the next outcome, each is equally likely to be the largest: so n + 1 positions count.
        place = min(max(0.0, level * (len(self.ordered) + 1) - 1.0), len(self.ordered) - 1.0)
        below = int(place)
        above = min(below + 1, len(self.ordered) - 1)
        return self.ordered[below] + (place - below) * (self.ordered[above] - self.ordered[below])

    def factors(self) -> Factors:
        return Factors(*(math.exp(self.at(level)) for level in (self.low, 0.5, self.high)))


class Calibration:
    """Factors of each kind of prediction, learned from outcomes. A new kind uses the factors of its family."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Hashable, ...], _Outcomes] = {}

    def observe(self, family: Hashable, kind: Hashable, predicted_s: float, measured_s: float, side: Side) -> None:
        """Add an outcome (seconds). Ignores times that are not positive or not finite."""
        if not (0.0 < predicted_s < math.inf and 0.0 < measured_s < math.inf):
            return
        log_ratio = math.log(measured_s / predicted_s)
        for key in ((family,), (family, kind)):
            self._kinds.setdefault(key, _Outcomes()).add(log_ratio, side)

    def factors(self, family: Hashable, kind: Hashable) -> Factors:
        """Return the factors for a prediction of this kind."""
        for key in ((family, kind), (family,)):
            known = self._kinds.get(key)
            if known is not None and len(known.last) >= FEWEST:
                return known.factors()
        return START


def side_of(measured_s: float, low_s: float, high_s: float) -> Side:
    """Return the position of an outcome relative to its interval."""
    return "below" if measured_s < low_s else "above" if measured_s > high_s else "inside"
