"""Length at which a prefill turns from memory-bound to compute-bound, and the threshold that follows this length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

LOW, HIGH = 64, 1024
"""Limits of the automatic threshold (tokens). With a smaller one nearly every request would be long; with a larger one
a short batch would be as much work as a long batch."""
START = 256
"""First value of the automatic threshold (tokens)."""
PERIOD_S = 10.0
"""Least time between two changes of the automatic threshold (seconds)."""
_HYSTERESIS = 0.15
"""The threshold follows the boundary only if both differ by more than this share of the threshold."""


def knee(alpha: float, linear: float, fixed: float) -> float:
    """Return the length of a prompt without history whose tokens cost as much as the step's fixed cost.

    Solves alpha L^2 + linear L = fixed. alpha: s/token^2; linear (beta + gamma_w): s/token; fixed: s per step of one
    request.
    """
    if alpha > 0.0:
        # The form of the root that does not subtract near-equal numbers.
        return 2.0 * fixed / (linear + math.sqrt(linear * linear + 4.0 * alpha * fixed)) if fixed > 0.0 else 0.0
    return fixed / linear if linear > 0.0 else math.inf


class Threshold:
    """Longest short request: as configured, or with ``auto`` the boundary of prompts without history, within limits.

    The automatic threshold moves at most once per PERIOD_S, and only if the boundary differs from it by more than 15%,
    so that requests do not flap between classes.
    """

    def __init__(self, configured: int | None) -> None:
        """Start with the `configured` threshold (tokens; None = auto)."""
        self.tokens = START if configured is None else configured
        """Longest short request (tokens, inclusive)."""
        self.source: Literal["fixed", "default", "knee"] = "default" if configured is None else "fixed"
        """Source of ``tokens``; of auto: "default" until steps are measured, then "knee"."""
        self._read_s = -math.inf

    def update(self, now: float, boundary: Callable[[], float | None]) -> None:
        """Update an automatic threshold if the period is over at ``now`` (seconds). ``boundary`` returns new tokens;
        infinite: never compute-bound; None: unknown."""
        if self.source == "fixed" or now - self._read_s < PERIOD_S or (found := boundary()) is None:
            return
        self._read_s = now
        wanted = round(min(max(found, LOW), HIGH))
        if self.source == "default" or abs(wanted - self.tokens) > _HYSTERESIS * self.tokens:
            self.tokens = wanted
        self.source = "knee"
