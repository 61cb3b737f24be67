"""A circuit breaker for each server: one that answers errors fast is the least loaded, and would draw the traffic."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "half_open", "open"]


@dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """Stock router flags (--cb-*, --disable-circuit-breaker)."""

    failures: int = 10
    """Failures not made up for by as many successes that open it; 0 = never."""
    successes: int = 3
    """Successes that close it when half open; at most as many requests are let in at a time."""
    timeout_s: float = 60.0
    """How long it stays open before it lets requests in on trial (seconds)."""
    window_s: float = 120.0
    """Failures are forgotten after this long without another (seconds)."""


class Breaker:
    """Closed: all requests pass. Open: none do. Half open: a few, on trial."""

    __slots__ = ("_clock", "_config", "_failed_at", "_failures", "_good", "_state", "_trials")

    def __init__(self, config: BreakerConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config or BreakerConfig()
        self._clock = clock
        self._state: State = "closed"
        self._failures = 0
        self._failed_at = 0.0
        self._good = 0
        self._trials = 0

    @property
    def state(self) -> State:
        """As of now."""
        if self._state == "open" and self._clock() - self._failed_at >= self._config.timeout_s:
            self._state, self._good = "half_open", 0
        return self._state

    def admits(self) -> bool:
        """Whether a request may pass now."""
        if self._state == "closed":
            return True
        return self.state == "half_open" and self._trials < max(1, self._config.successes)

    def enter(self) -> bool:
        """A request passes; True if it is on trial and must ``leave``."""
        trial = self._state == "half_open"
        self._trials += trial
        return trial

    def leave(self) -> None:
        """A request on trial has ended."""
        self._trials -= 1

    def succeeded(self) -> None:
        """The server has served a request."""
        if self._state == "closed":
            # Each success makes up for a failure: a server that fails more often than not will open it too.
            if self._failures:
                self._failures -= 1
        elif self._state == "half_open":
            self._good += 1
            if self._good >= self._config.successes:
                self._state, self._failures = "closed", 0

    def healed(self) -> None:
        """The server is well again after it was gone: what it failed before says little, so it is on trial at once."""
        if self._state == "open":
            self._state, self._good = "half_open", 0

    def failed(self) -> None:
        """It answered 5xx, or not at all."""
        if self._state == "open" or not self._config.failures:
            return
        now = self._clock()
        if now - self._failed_at > self._config.window_s:
            self._failures = 0
        self._failures += 1
        self._failed_at = now
        if self._state == "half_open" or self._failures >= self._config.failures:
            self._state = "open"
