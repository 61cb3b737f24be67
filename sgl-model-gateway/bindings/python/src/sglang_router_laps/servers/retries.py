"""How often and after which pause a request is tried again."""

from __future__ import annotations

import random
from dataclasses import dataclass

EARNED = 0.2
"""Retries that one request allows: what is overloaded is not to be asked much more often than it was meant to be."""
SAVED_MAX = 100.0
"""Retries that can be saved up; as many are there at the start."""


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """Stock router flags (--retry-*, --disable-retries)."""

    attempts: int = 5
    """Most tries of one request, the first one included."""
    backoff_s: float = 0.05
    """Pause before the first retry (seconds)."""
    backoff_max_s: float = 30.0
    """Longest pause (seconds)."""
    growth: float = 1.5
    """Each pause is this many times the one before."""
    jitter: float = 0.2
    """A pause is stretched or cut by up to this share."""

    def pause_s(self, retry: int) -> float:
        """Pause before retry number ``retry``, counted from 0 (seconds)."""
        # A power of this size would overflow long after the maximum is reached.
        pause = min(self.backoff_s * self.growth ** min(retry, 64), self.backoff_max_s)
        return max(0.0, pause * (1 + self.jitter * (2 * random.random() - 1)))


class RetryBudget:
    """Retries that all requests together may use up for servers that answered 503."""

    __slots__ = ("_saved",)

    def __init__(self) -> None:
        self._saved = SAVED_MAX

    def earn(self) -> None:
        """A request has come in."""
        if self._saved < SAVED_MAX:
            self._saved += EARNED

    def spend(self) -> bool:
        """Take one retry, if there is one left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
