"""Circuit breaker of a server. A server that fails fast has the least load, and would attract the traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "half_open", "open"]


@dataclass(eq=False, slots=True)
class Breaker:
    """Closed: all requests pass. Open: no request passes. Half open: a few pass on trial. Defaults: those of --cb-*."""

    clock: Callable[[], float]
    """Clock (seconds)."""
    failures: int = 10
    """Failures minus successes that open the breaker; 0 = it never opens."""
    successes: int = 3
    """Successes that close a half-open breaker; also the most requests on trial at the same time."""
    timeout_s: float = 60.0
    """Time for which the breaker stays open before it admits requests on trial (seconds)."""
    window_s: float = 120.0
    """Time without a failure after which earlier failures are forgotten (seconds)."""
    _state: State = "closed"
    _failed: int = 0
    _failed_at: float = 0.0
    _good: int = 0
    _trials: int = 0

    @property
    def state(self) -> State:
        if self._state == "open" and self.clock() - self._failed_at >= self.timeout_s:
            self.healed()
        return self._state

    def admits(self) -> bool:
        if self._state == "closed":
            return True
        return self.state == "half_open" and self._trials < max(1, self.successes)

    def enter(self) -> bool:
        """Count a request that passes; return True if the request is on trial and must call ``leave``."""
        trial = self._state == "half_open"
        self._trials += trial
        return trial

    def leave(self) -> None:
        """Count the end of a request on trial."""
        self._trials -= 1

    def succeeded(self) -> None:
        """Count a request that the server has served."""
        if self._state == "closed":
            # Each success cancels one failure: a server that fails more often than it succeeds opens the breaker.
            if self._failed:
                self._failed -= 1
        elif self._state == "half_open":
            self._good += 1
            if self._good >= self.successes:
                self._state, self._failed = "closed", 0

    def healed(self) -> None:
        """Set an open breaker to half open: after a recovery, earlier failures say little about the server."""
        if self._state == "open":
            self._state, self._good = "half_open", 0

    def failed(self) -> None:
        """Count an error (5xx) or a missing answer."""
        if self._state == "open" or not self.failures:
            return
        now = self.clock()
        if now - self._failed_at > self.window_s:
            self._failed = 0
        self._failed += 1
        self._failed_at = now
        if self._state == "half_open" or self._failed >= self.failures:
            self._state = "open"
