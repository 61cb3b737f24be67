"""The length at which a prefill turns from memory-bound to compute-bound, and the threshold that follows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

LOW, HIGH = 64, 1024
"""Clamps of the automatic threshold (tokens). Below, nearly every request would be long; above, a short batch would
itself be long work."""
START = 256
"""First value of the automatic threshold (tokens)."""
PERIOD_S = 10.0
"""The automatic threshold moves no more often than this (seconds)."""
_HYSTERESIS = 0.15
"""The boundary must leave the threshold in force by this share before the threshold follows."""


def knee(alpha: float, linear: float, fixed: float) -> float:
    """Return the new tokens of a prompt without history whose own cost equals the step's cost before the first of them.

    Solves alpha L^2 + linear L = fixed. alpha: s/token^2; linear (beta + gamma_w): s/token; fixed: s per step of one
    request.
    """
    if alpha > 0.0:
        # The form of the root that does not subtract near-equal numbers.
        return 2.0 * fixed / (linear + math.sqrt(linear * linear + 4.0 * alpha * fixed)) if fixed > 0.0 else 0.0
    return fixed / linear if linear > 0.0 else math.inf


class Threshold:
    """The longest short request: as configured, or with ``auto`` the first-turn boundary, clamped, and slow to move so
    that classes do not flap.

    It moves at most once per PERIOD_S, and only when the boundary is 15% away from the threshold in force.
    """

    def __init__(self, configured: int | None) -> None:
        """`configured`: tokens; None = auto."""
        self.tokens = START if configured is None else configured
        """Longest short request (tokens, inclusive)."""
        self.source: Literal["fixed", "default", "knee"] = "default" if configured is None else "fixed"
        """Source of ``tokens``; of auto: "default" until steps are measured, then "knee"."""
        self._read_s = -math.inf

    def update(self, now: float, boundary: Callable[[], float | None]) -> None:
        """Read the boundary again (new tokens; infinite: never compute-bound; None: unknown) if the period is over at
        ``now`` (seconds)."""
        if self.source == "fixed" or now - self._read_s < PERIOD_S or (found := boundary()) is None:
            return
        self._read_s = now
        wanted = round(min(max(found, LOW), HIGH))
        if self.source == "default" or abs(wanted - self.tokens) > _HYSTERESIS * self.tokens:
            self.tokens = wanted
        self.source = "knee"
