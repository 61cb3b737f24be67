"""Definition of a deadline for the first token, for all: server, router and flags ask here."""

from __future__ import annotations

from typing import Any

SHORTEST_MS = 0.1
"""Shorter than any prefill step: such a deadline is missed whatever is done (milliseconds)."""
LONGEST_MS = 1e9
"""Eleven days: longer than any request lives (milliseconds)."""

REPLY_S = 5e-3
"""A first token is due so much earlier at the scheduler than at the client (seconds)."""

RANGE = f"a number of milliseconds from {SHORTEST_MS:g} to {LONGEST_MS:g}"


def due_s(arrival_s: float, slo_s: float | None) -> float | None:
    """When a first token is due at the scheduler (seconds of the clock of ``arrival_s``); None without a deadline."""
    return None if slo_s is None else arrival_s + slo_s - REPLY_S


def valid(ms: Any) -> bool:
    """Return True if ``ms`` is a deadline.

    Ask before anything else looks at the value: it may be of any kind, and as a number NaN, infinite or 10**400.
    """
    # Compared, never converted: a whole number may be too large for a float.
    return isinstance(ms, (int, float)) and not isinstance(ms, bool) and SHORTEST_MS <= ms <= LONGEST_MS
