"""Ratio of two variants over rounds, and the interval that the rounds support."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.9
"""Confidence that the interval around a median needs for a verdict (0..1)."""


@dataclass(frozen=True)
class Ratio:
    """Ratio of two variants: the median of per-round ratios, and an interval for it."""

    median: float
    low: float
    high: float
    rounds: int
    confidence: float
    """Probability that such an interval covers the true median, for any distribution of the noise (0..1)."""

    @property
    def verdict(self) -> str:
        """Return "more" or "less"; "not shown" if the interval holds 1 or too few rounds were run."""
        if self.confidence < LEVEL or self.low <= 1.0 <= self.high:
            return "not shown"
        return "more" if self.low > 1.0 else "less"


def ratio(new: Sequence[float], base: Sequence[float]) -> Ratio:
    """Return new / base, round by round; NaN if a round lacks a value. Raises ValueError on unequal numbers of rounds,
    or none."""
    per_round = [_over(a, b) for a, b in zip(new, base, strict=True)]
    if any(math.isnan(value) for value in per_round):
        return Ratio(math.nan, math.nan, math.nan, len(per_round), 0.0)
    return Ratio(statistics.median(per_round), *interval(per_round))


def _over(a: float, b: float) -> float:
    if b != 0.0:
        return a / b
    return 1.0 if a == 0.0 else math.inf


def interval(values: Sequence[float]) -> tuple[float, float, int, float]:
    """Return (low, high, n, confidence): the narrowest pair of order statistics that covers the median with LEVEL.

    Distribution-free: the number of values below the median is binomial. If no pair reaches LEVEL, return the
    lowest and the highest value with their confidence.
    """
    ordered, n = sorted(values), len(values)
    if n == 0:
        raise ValueError("no rounds")
    cut = 0
    while cut + 1 < n - cut - 1 and _coverage(n, cut + 1) >= LEVEL:
        cut += 1
    return ordered[cut], ordered[n - 1 - cut], n, _coverage(n, cut)


def _coverage(n: int, cut: int) -> float:
    """Return P(the median lies between the values ranked ``cut`` from either end)."""
    return 1.0 - 2.0 * sum(math.comb(n, i) for i in range(cut + 1)) / 2.0**n
