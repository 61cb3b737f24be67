"""Circuit breaker of a server: one that fails fast has the least load, and would attract the traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "half_open", "open"]


@dataclass(eq=False, slots=True)
class Breaker:
    """Closed: all requests pass. Open: none do. Half open: a few, on trial. The defaults are those of --cb-*."""

    clock: Callable[[], float]
    """Returns the time (seconds)."""
    failures: int = 10
    """Failures, less successes, that open the breaker; 0 = never."""
    successes: int = 3
    """Successes that close a half-open breaker, and requests admitted at a time until then."""
    timeout_s: float = 60.0
    """Time for which the breaker stays open before requests are admitted on trial (seconds)."""
    window_s: float = 120.0
    """Failures are forgotten after this long without another (seconds)."""
    _state: State = "closed"
    _failed: int = 0
    _failed_at: float = 0.0
    _good: int = 0
    _trials: int = 0

    @property
    def state(self) -> State:
        """Return the current state."""
        if self._state == "open" and self.clock() - self._failed_at >= self.timeout_s:
            self.healed()
        return self._state

    def admits(self) -> bool:
        """Return True if a request may pass now."""
        if self._state == "closed":
            return True
        return self.state == "half_open" and self._trials < max(1, self.successes)

    def enter(self) -> bool:
        """Count a request that passes; return True if it is on trial and must ``leave``."""
        trial = self._state == "half_open"
        self._trials += trial
        return trial

    def leave(self) -> None:
        """Count the end of a request on trial."""
        self._trials -= 1

    def succeeded(self) -> None:
        """Count a request that the server has served."""
        if self._state == "closed":
            # Each success makes up for one failure, so a server that fails more often than not opens it, too.
            if self._failed:
                self._failed -= 1
        elif self._state == "half_open":
            self._good += 1
            if self._good >= self.successes:
                self._state, self._failed = "closed", 0

    def healed(self) -> None:
        """Half-open the breaker when the server has recovered: its earlier failures say little now."""
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
