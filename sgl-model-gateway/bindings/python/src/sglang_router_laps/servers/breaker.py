"""A circuit breaker for each server: one that answers errors fast is the least loaded, and would draw the traffic."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "half_open", "open"]


class Breaker:
    """Closed: all requests pass. Open: none do. Half open: a few, on trial. The defaults are those of --cb-*."""

    def __init__(
        self,
        failures: int = 10,
        successes: int = 3,
        timeout_s: float = 60.0,
        window_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``failures`` not made up for by as many successes open it (0 = never); without another they are forgotten
        after ``window_s`` (seconds). It stays open for ``timeout_s`` (seconds), then ``successes`` close it; at most
        as many requests are let in at a time."""
        self._failures_max = failures
        self._successes = successes
        self._timeout_s = timeout_s
        self._window_s = window_s
        self._clock = clock
        self._state: State = "closed"
        self._failures = 0
        self._failed_at = 0.0
        self._good = 0
        self._trials = 0

    @property
    def state(self) -> State:
        """As of now."""
        if self._state == "open" and self._clock() - self._failed_at >= self._timeout_s:
            self._state, self._good = "half_open", 0
        return self._state

    def admits(self) -> bool:
        """Whether a request may pass now."""
        if self._state == "closed":
            return True
        return self.state == "half_open" and self._trials < max(1, self._successes)

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
            if self._good >= self._successes:
                self._state, self._failures = "closed", 0

    def healed(self) -> None:
        """The server is well again after it was gone: what it failed before says little, so it is on trial at once."""
        if self._state == "open":
            self._state, self._good = "half_open", 0

    def failed(self) -> None:
        """It answered 5xx, or not at all."""
        if self._state == "open" or not self._failures_max:
            return
        now = self._clock()
        if now - self._failed_at > self._window_s:
            self._failures = 0
        self._failures += 1
        self._failed_at = now
        if self._state == "half_open" or self._failures >= self._failures_max:
            self._state = "open"
