"""How often and after which pause a request is tried again."""

from __future__ import annotations

import random

from sglang_router.router_args import RouterArgs

EARNED = 0.2
"""Retries that one request allows: what is overloaded is not to be asked much more often than it was meant to be."""
SAVED_MAX = 100.0
"""Retries that can be saved up; as many are there at the start."""


class Retries:
    """As --retry-* and --disable-retries say, with a budget of all requests for servers that answered 503."""

    def __init__(self, args: RouterArgs) -> None:
        # As the stock flags count: the first try is one of them.
        self.attempts = 1 if args.disable_retries else max(1, args.retry_max_retries)
        """Most tries of one request, the first one included."""
        self._args = args
        self._saved = SAVED_MAX

    def pause_s(self, retry: int) -> float:
        """Pause before retry number ``retry``, counted from 0 (seconds)."""
        args = self._args
        # A power of this size would overflow long after the maximum is reached.
        pause_ms = args.retry_initial_backoff_ms * args.retry_backoff_multiplier ** min(retry, 64)
        jitter = 1 + args.retry_jitter_factor * (2 * random.random() - 1)
        return max(0.0, min(pause_ms, args.retry_max_backoff_ms) / 1e3 * jitter)

    def earn(self) -> None:
        """A request has come in."""
        if self._saved < SAVED_MAX:
            self._saved += EARNED

    def spend(self) -> bool:
        """Take one retry out of the budget, if there is one left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
