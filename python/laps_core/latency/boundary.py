"""The length at which a prefill turns from memory-bound to compute-bound, and the threshold that follows it."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from laps_core.config import LapsConfig

_HYSTERESIS = 0.15
"""The boundary must leave the threshold in force by this share before the threshold follows."""


class Boundary(NamedTuple):
    """A boundary length and where it comes from."""

    tokens: float
    """New tokens; infinite where compute never overtakes."""
    source: str
    """"closed-form" (separate compute and memory terms are known) or "knee" (from step totals)."""


def closed_form(alpha: float, beta: float, gamma_w: float, gamma_r: float, history: int = 0) -> float:
    """L_m: new tokens at which compute time equals memory time [L s2.1].

    alpha: s/token^2; beta, gamma_w, gamma_r: s/token; history: cached tokens H. With no history
    (gamma_w - beta) / alpha; it grows with H towards gamma_r / (2 alpha) whatever the linear terms.
    """
    return _root(alpha, 2.0 * alpha * history + beta - gamma_w, gamma_r * history)


def knee(alpha: float, linear: float, gamma_r: float, fixed: float, history: int = 0) -> float:
    """New tokens whose own cost equals what the step costs before the first of them.

    Solves alpha L (L + 2H) + linear L = fixed + gamma_r H. alpha: s/token^2; linear (beta + gamma_w), gamma_r: s/token;
    fixed: s per step of one request.
    """
    return _root(alpha, 2.0 * alpha * history + linear, fixed + gamma_r * history)


def _root(a: float, b: float, c: float) -> float:
    """Larger root of a x^2 + b x = c for a, c >= 0; infinite where nothing grows."""
    if a > 0.0:
        root = math.sqrt(b * b + 4.0 * a * c)
        # Of two equal forms, the one that does not subtract near-equal numbers.
        return max(0.0, (root - b) / (2.0 * a) if b <= 0.0 else 2.0 * c / (root + b))
    if b > 0.0:
        return c / b
    return math.inf


class HasBoundary(Protocol):
    def boundary(self, history: int = 0) -> Boundary | None: ...


class AutoThreshold:
    """``--laps-length-threshold auto``: the first-turn boundary, clamped, and slow to move so that classes do not flap.

    Moves at most once per ``threshold_period_s``, and only when the boundary is 15% away from the threshold in force.
    """

    def __init__(self, config: LapsConfig, start: int = 256) -> None:
        self._low, self._high, self._period_s = config.threshold_min, config.threshold_max, config.threshold_period_s
        self.tokens = min(max(start, self._low), self._high)
        """Longest short request (tokens, inclusive)."""
        self.source = "default"
        self._read_s = -math.inf

    def update(self, now: float, model: HasBoundary) -> int:
        """The threshold in force (tokens) at ``now`` (seconds), read again from the model when the period is over."""
        if now - self._read_s < self._period_s:
            return self.tokens
        found = model.boundary()
        if found is None:
            return self.tokens
        self._read_s = now
        wanted = round(min(max(found.tokens, self._low), self._high))
        if self.source == "default" or abs(wanted - self.tokens) > _HYSTERESIS * self.tokens:
            self.tokens = wanted
        self.source = found.source
        return self.tokens
