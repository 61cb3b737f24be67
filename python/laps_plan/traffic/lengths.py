"""Distributions of prompt lengths (tokens)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from laps_plan.traffic import traces

Sizes = Callable[[random.Random], int]
"""Function that draws the new tokens of one request."""


def uniform(low: int, high: int) -> Sizes:
    """Return lengths from ``low`` to ``high``, all equally likely."""
    span = high - low + 1
    return lambda rng: low + int(rng.random() * span)


def fixed(tokens: int) -> Sizes:
    """Return the constant length ``tokens``."""
    return lambda rng: tokens


def log_uniform(low: int, high: int) -> Sizes:
    """Return lengths between ``low`` and ``high``, uniform in the logarithm."""
    base, span = math.log(low), math.log(high / low)
    return lambda rng: round(math.exp(base + span * rng.random()))


def drawn(pool: Sequence[int]) -> Sizes:
    """Return lengths drawn from a list."""
    n = len(pool)
    return lambda rng: pool[int(rng.random() * n)]


def lmsys(cap: int | None = None) -> Sizes:
    """Return LMSYS-Chat-1M prompt lengths (python/laps_plan/traces), at most ``cap``."""
    return drawn([max(1, job.new if cap is None else min(cap, job.new)) for job in traces.read("lmsys_lengths")])


def mix(short: Sizes, long: Sizes, long_share: float) -> Sizes:
    """Return lengths from ``long`` with probability ``long_share`` (0..1), else from ``short``."""

    def draw(rng: random.Random) -> int:
        return long(rng) if rng.random() < long_share else short(rng)

    return draw
