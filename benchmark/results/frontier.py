"""Pareto frontier of two figures, and a point's distance from it. Smaller figures are better."""

from __future__ import annotations

import math
from collections.abc import Iterable

Point = tuple[float, float]
"""Two figures, both positive."""


def envelope(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other one beats or equals in both figures, sorted by the first."""
    best: list[Point] = []
    for x, y in sorted(set(points)):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def distance(point: Point, frontier: Iterable[Point]) -> float:
    """Return the distance from the best compromise: the natural log of the geometric mean of both figures, over the
    least of ``frontier``.

    0 = no point of the frontier has a smaller product; 1 = e times as large on average of the two. Both figures count
    alike, by their ratios. A point on the frontier that buys little of one with much of the other is far away.
    """
    return 0.5 * (math.log(point[0] * point[1]) - min(math.log(a * b) for a, b in frontier))


def shared(point: Point, frontier: Iterable[Point]) -> float:
    """Return by how much both figures could shrink together: the least d so that ``point`` times exp(-d) is not beaten.

    0 = on the frontier, wherever that is.
    """
    x, y = point
    return max([0.0, *(min(math.log(x / a), math.log(y / b)) for a, b in frontier)])
