"""The length at which a prefill turns from memory-bound to compute-bound, and the threshold that follows it."""

from __future__ import annotations

import math
from typing import Protocol

LOW, HIGH = 64, 1024
"""Clamps of the automatic threshold (tokens). Below, nearly every request would be long; above, a short batch would
itself be long work."""
PERIOD_S = 10.0
"""The automatic threshold moves no more often than this (seconds)."""
_HYSTERESIS = 0.15
"""The boundary must leave the threshold in force by this share before the threshold follows."""


def knee(alpha: float, linear: float, gamma_r: float, fixed: float, history: int = 0) -> float:
    """New tokens whose own cost equals what the step costs before the first of them.

    Solves alpha L (L + 2H) + linear L = fixed + gamma_r H. alpha: s/token^2; linear (beta + gamma_w), gamma_r: s/token;
    fixed: s per step of one request.
    """
    slope, offset = 2.0 * alpha * history + linear, fixed + gamma_r * history
    if alpha > 0.0:
        # Of two equal forms of the root, the one that does not subtract near-equal numbers.
        return 2.0 * offset / (slope + math.sqrt(slope * slope + 4.0 * alpha * offset)) if offset > 0.0 else 0.0
    return offset / slope if slope > 0.0 else math.inf


class HasBoundary(Protocol):
    """What tells where prefill turns compute-bound (new tokens; infinite: never; None: not known yet)."""

    def boundary(self) -> float | None: ...


class AutoThreshold:
    """``--laps-length-threshold auto``: the first-turn boundary, clamped, and slow to move so that classes do not flap.

    Moves at most once per PERIOD_S, and only when the boundary is 15% away from the threshold in force.
    """

    def __init__(self, start: int = 256) -> None:
        self.tokens = min(max(start, LOW), HIGH)
        """Longest short request (tokens, inclusive)."""
        self.source = "default"
        """Where it comes from: "default" until steps are measured, then "knee"."""
        self._read_s = -math.inf

    def update(self, now: float, model: HasBoundary) -> int:
        """The threshold in force (tokens) at ``now`` (seconds), read again from the model when the period is over."""
        if now - self._read_s < PERIOD_S:
            return self.tokens
        found = model.boundary()
        if found is None:
            return self.tokens
        self._read_s = now
        wanted = round(min(max(found, LOW), HIGH))
        if self.source == "default" or abs(wanted - self.tokens) > _HYSTERESIS * self.tokens:
            self.tokens = wanted
        self.source = "knee"
        return self.tokens
