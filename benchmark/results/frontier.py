"""The best that anybody reached of two figures at once, and how far from it somebody is. Smaller figures are better."""

from __future__ import annotations

import math
from collections.abc import Iterable

Point = tuple[float, float]
"""Two figures, both positive."""


def envelope(points: Iterable[Point]) -> list[Point]:
    """Those that no other one beats or equals in both figures, by the first."""
    best: list[Point] = []
    for x, y in sorted(set(points)):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def distance(point: Point, frontier: Iterable[Point], *, same: float = 1.0) -> float:
    """How much better both figures could be: the mean of the natural logs of their ratios to those of the point of
    ``frontier`` where it is largest; exp of it is the geometric mean of the two factors. 0 = on the frontier.

    Only points count that are no worse in either figure; ``same``: up to this factor they are as good.
    """
    x, y = point
    return max(
        (0.5 * math.log(x / a * y / b) for a, b in frontier if a <= same * x and b <= same * y), default=0.0
    )  # fmt: skip


def shared(point: Point, frontier: Iterable[Point]) -> float:
    """By how much both figures could shrink together: the least d so that ``point`` times exp(-d) is not beaten."""
    x, y = point
    return max([0.0, *(min(math.log(x / a), math.log(y / b)) for a, b in frontier)])
