"""Definition of a deadline for the first token, shared by server, router and flags."""

from __future__ import annotations

from typing import Any

SHORTEST_MS = 0.1
"""Shortest valid deadline, shorter than any prefill step, so that it is always missed (milliseconds)."""
LONGEST_MS = 1e9
"""Longest valid deadline, eleven days: longer than any request lives (milliseconds)."""

REPLY_S = 5e-3
"""Time for an answer to reach its client: the scheduler must have the first token this much earlier (seconds)."""

RANGE = f"a number of milliseconds from {SHORTEST_MS:g} to {LONGEST_MS:g}"


def due_s(arrival_s: float, slo_s: float | None) -> float | None:
    """Return when the scheduler must have the first token (clock of ``arrival_s``, seconds); None = no deadline."""
    return None if slo_s is None else arrival_s + slo_s - REPLY_S


def valid(ms: Any) -> bool:
    """Return True if ``ms`` is a valid deadline (milliseconds).

    Call this before other code uses the value, which can have any type, or be NaN, infinite or 10**400.
    """
    # Compare without converting to float: an int can be too large for a float.
    return isinstance(ms, (int, float)) and not isinstance(ms, bool) and SHORTEST_MS <= ms <= LONGEST_MS
