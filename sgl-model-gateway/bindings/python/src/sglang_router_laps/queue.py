"""Queue of requests that wait for a free slot, or for a healthy server of each role."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from itertools import islice

from laps_core.policy.order import s_edf
from laps_core.policy.predict import TOKEN_S
from laps_core.policy.types import LOOKAHEAD, Waiting
from sglang_router.router_args import RouterArgs

MOST = 8192
"""Most requests in flight without --max-concurrent-requests: more requests would only wait at the servers."""
HEALED_S = 10.0
"""Longest wait for a server to recover (seconds); then the request fails."""
LOOK_S = 0.05
"""Period at which a waiting request checks for a healthy server (seconds)."""
OLDEST_EVERY = 8
"""One of this many consecutive turns, at least, goes to the request that has waited longest."""
TIMER_S = 0.002
"""Time by which a timer may fire early (seconds), because uvloop counts whole milliseconds."""


class TurnedAway(Exception):
    """A request is refused, at once or after waiting."""

    def __init__(self, status: int, kind: str, why: str, after_s: int | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.kind = kind
        self.after_s = after_s
        """Seconds after which to retry (Retry-After); None if a retry is of no use."""


def misses_deadline(late_s: float) -> TurnedAway:
    """Return the refusal of a request whose first token is predicted ``late_s`` after its deadline (seconds).
    Retry-After is that delay, because the work ahead must shrink by as much."""
    why = f"the first token is predicted {late_s:.3f} s after the deadline"
    return TurnedAway(429, "deadline_missed", why, max(1, math.ceil(late_s)))


def _key(w: Waiting, now: float) -> tuple[float, ...]:
    # Work is estimated from tokens, because no server, and so no latency model, is chosen yet.
    work_s = w.tokens * TOKEN_S
    return w.priority, *s_edf(w, work_s, work_s, now)


class Queue:
    """Admission of up to ``max_in_flight`` requests at a time, and a queue of up to --queue-size more requests.

    The next request is the one with the smallest priority value (short before long), then the one with the earliest
    deadline that can still be met (``order.s_edf``). At least every eighth turn goes to the oldest request.
    """

    def __init__(self, args: RouterArgs, has_servers: Callable[[], bool]) -> None:
        """``has_servers`` returns True if each role has a healthy server."""
        self.max_in_flight: int = args.max_concurrent_requests if args.max_concurrent_requests > 0 else MOST
        self.max_queued = args.queue_size
        self.in_flight = 0
        self._timeout_s = float(min(args.queue_timeout_secs, args.request_timeout_secs))
        self._has_servers = has_servers
        self._queued: dict[asyncio.Future[None], Waiting] = {}
        """Queued requests in order of arrival, by the future (turn) that admits each request."""
        self._waiting_for_server = 0
        """Number of admitted requests that wait for a healthy server."""
        self._passed = 0
        """Number of turns since the oldest request was last admitted."""

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for admission or for a healthy server."""
        return len(self._queued) + self._waiting_for_server

    def oldest_s(self) -> float:
        """Return how long the first request in the queue has waited (seconds)."""
        first = next(iter(self._queued.values()), None)
        return 0.0 if first is None else time.monotonic() - first.since_s

    def after_s(self) -> int:
        """Return Retry-After (seconds): the wait of the first queued request, at least 1 and at most the time-out."""
        return max(1, math.ceil(min(self.oldest_s(), self._timeout_s)))

    def check_admission(self) -> None:
        """Raise TurnedAway if a new request could neither be admitted nor queued."""
        if self.in_flight >= self.max_in_flight and len(self._queued) >= self.max_queued:
            why = f"{self.in_flight} requests are in flight and {len(self._queued)} are queued"
            raise TurnedAway(429, "overloaded", why, self.after_s())

    def enter(self) -> bool:
        """Admit a request and return True if a slot is free; ``leave`` frees the slot."""
        if self.in_flight >= self.max_in_flight:
            return False
        self.in_flight += 1
        return True

    async def wait(self, waiting: Waiting, until: float) -> None:
        """Wait in the queue until admitted. Raises TurnedAway after the time-out, and at ``until`` (monotonic
        seconds)."""
        turn = asyncio.get_running_loop().create_future()
        self._queued[turn] = waiting
        try:
            async with asyncio.timeout(min(until, waiting.since_s + self._timeout_s) - time.monotonic()):
                await turn
        except BaseException as e:
            if turn.done() and not turn.cancelled():
                # The request was admitted in the moment of its cancellation: free the slot.
                self.leave()
            if not isinstance(e, TimeoutError):
                raise
            raise self.too_late(until) from None
        finally:
            self._queued.pop(turn, None)

    def too_late(self, until: float) -> TurnedAway:
        """Return the refusal of a request that was not admitted before its deadline or the time-out."""
        if time.monotonic() + TIMER_S >= until:
            return TurnedAway(429, "deadline_missed", "the deadline can no longer be met", self.after_s())
        return TurnedAway(408, "queue_timeout", f"not admitted within {self._timeout_s:.0f} s", self.after_s())

    def leave(self) -> None:
        """Free a slot, and admit the next requests."""
        self.in_flight -= 1
        while self._queued and self.in_flight < self.max_in_flight:
            turn = self._next()
            del self._queued[turn]
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)

    def _next(self) -> asyncio.Future[None]:
        now = time.monotonic()
        oldest = next(iter(self._queued))
        line = [oldest] if self._passed >= OLDEST_EVERY - 1 else islice(self._queued, LOOKAHEAD)
        first = min(line, key=lambda turn: _key(self._queued[turn], now))
        self._passed = 0 if first is oldest else self._passed + 1
        return first

    async def wait_for_servers(self, until: float) -> bool:
        """Wait, once admitted, until each role has a healthy server. Return False if timed out or the queue is full."""
        if self.waiting >= self.max_queued:
            return False
        until = min(until, time.monotonic() + min(self._timeout_s, HEALED_S))
        self._waiting_for_server += 1
        try:
            while not self._has_servers():
                if time.monotonic() >= until:
                    return False
                await asyncio.sleep(LOOK_S)
            return True
        finally:
            self._waiting_for_server -= 1
