"""Prediction of when a prefill server would answer a request, from the work ahead of it and its own."""

from __future__ import annotations

import math

from laps_core.latency.step import Coefficients
from laps_core.length import SHORT, ClassName
from laps_core.pools.arrivals import Arrivals
from laps_core.pools.pressure import Work
from laps_core.protocol import Assignment

START = Coefficients(alpha=0.0, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.0)
"""Latency model of a server until its steps have been measured."""
MEMORY = 0.999
"""Decay of the learnt speed per request (ratio)."""
ENOUGH = 8
"""Requests after which the learnt model is good enough to refuse a request by."""


class Learnt:
    """Latency model of servers that report none: a line over the new tokens of requests that were alone there.

    Shared by all of them. With one line each, the server that looks fastest by chance would get the requests, and the
    other servers would never be measured again.
    """

    def __init__(self) -> None:
        self.model = START
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def enough(self) -> bool:
        """Return True if enough requests were measured to rely on the model."""
        return self._sums[0] > ENOUGH - 0.5

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a request of ``tokens`` new tokens."""
        one = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        n, t, tt, y, ty = (MEMORY * a + b for a, b in zip(self._sums, one, strict=True))
        self._sums = n, t, tt, y, ty
        spread = n * tt - t * t
        slope = (n * ty - t * y) / spread if spread > 0.01 * n * tt else 0.0
        if not 0.0 < slope * t < y:
            slope = y / t
        self.model = Coefficients(0.0, slope, 0.0, 0.0, max(0.0, (y - slope * t) / n))


class Outlook:
    """Work of one server, as one router knows it. Times are of the caller's clock (seconds).

    Requests are batched, so a step's own time counts once for all of them. Where short requests park long prefills,
    they wait for short ones only.
    """

    __slots__ = (
        "_alone", "_learnt", "_long", "_others_short_until", "_others_until", "_short", "_since", "arrivals", "done",
        "free_at", "own_model", "parks", "shared",
    )  # fmt: skip

    def __init__(self, learnt: Learnt) -> None:
        self.own_model: Coefficients | None = None
        """Server-reported latency model, if any."""
        self.parks = False
        """True if the server runs LAPS: a long prefill there is parked while short ones run."""
        self.shared = False
        """True if other routers' requests were at work there at the last poll."""
        self.arrivals = Arrivals()
        self.free_at = -math.inf
        """Time from which no work is known there; infinite while this router has some there."""
        self.done = Work()
        """Finished work of this router there, since the start (seconds)."""
        self._learnt = learnt
        self._alone = False
        self._short = self._long = 0.0
        self._others_short_until = self._others_until = -math.inf
        """Times at which other routers' known work is done: the short, and after it all."""
        self._since = 0.0

    @property
    def model(self) -> Coefficients:
        """Return the server's own latency model, or the learnt one."""
        return self.own_model or self._learnt.model

    def enter(self, now: float, cls: ClassName, work_s: float) -> None:
        """Add a request that this router sends there."""
        self.free_at = math.inf
        # The time to first token of a request that is alone there measures the server.
        self._alone = not (self.shared or any(self.waiting(now)))
        if not (self._short or self._long):
            self._since = now
        if self.arrivals.lengths is None:
            self.arrivals.add(now, cls, work_s)
        if cls == SHORT:
            self._short += work_s
        else:
            self._long += work_s

    def leave(self, now: float, cls: ClassName, work_s: float, tokens: int) -> None:
        """Remove a request that has its first token after ``tokens`` new tokens; 0: without one."""
        if tokens and self._alone and self.own_model is None and now > self._since:
            self._learnt.observe(tokens, now - self._since)
        self._since = now
        # Rounding errors would keep the sum of floats from 0.0.
        if cls == SHORT:
            self.done = Work(self.done.short + work_s, self.done.long)
            self._short = self._short - work_s if self._short - work_s > 1e-9 else 0.0
        else:
            self.done = Work(self.done.short, self.done.long + work_s)
            self._long = self._long - work_s if self._long - work_s > 1e-9 else 0.0
        self.free_at = math.inf if self._short or self._long else self._others_until

    def seen(self, others: bool) -> None:
        """Set whether other routers' requests are at work there now, however little of them waits."""
        self.shared = others
        self._alone = self._alone and not others

    def told(self, now: float, short_s: float, long_s: float) -> None:
        """Take in the work that the server reports as waiting (seconds): all but this router's is other routers'."""
        self._note(now, short_s - self._short, long_s - self._long)

    def told_others(self, now: float, pool: Assignment, seconds: float) -> None:
        """Take in other routers' waiting work (seconds); its class is guessed from ``pool``."""
        self._note(now, seconds, 0.0) if pool == SHORT else self._note(now, 0.0, seconds)

    def _note(self, now: float, short_s: float, long_s: float) -> None:
        self._others_short_until = now + max(0.0, short_s)
        self._others_until = self._others_short_until + max(0.0, long_s)
        self.free_at = math.inf if self._short or self._long else self._others_until
        self._alone = self._alone and self._others_until <= now

    def waiting(self, now: float) -> Work:
        """Return the work there (seconds)."""
        short_until, until = self._others_short_until, self._others_until
        if now >= until:
            return Work(self._short, self._long)
        if now >= short_until:
            return Work(self._short, self._long + (until - now))
        return Work(self._short + (short_until - now), self._long + (until - short_until))

    def first_s(self, now: float, new: int, cached: int, short: bool) -> float | None:
        """Return the predicted time to first token of a request sent now (seconds); None if it is uncertain: the model
        is neither reported nor learnt, or the server is idle, so that the request can be measured."""
        waits = self.waiting(now)
        if self.own_model is None and not (self._learnt.enough and any(waits)):
            return None
        cost_s = self.cost_s(now, new, cached, short)
        if short and self.parks and waits.long:
            # The delay caused to a long request is not part of the short one's time.
            cost_s -= self.model.step_s + self.model.work_s(new, cached)
        return cost_s

    def cost_s(self, now: float, new: int, cached: int, short: bool) -> float:
        """Return the predicted time to the answer of a request sent now, plus the delay of a long one that it preempts
        (seconds)."""
        model = self.own_model or self._learnt.model
        return self.with_work_s(now, model.step_s, model.work_s(new, cached), short)

    def with_work_s(self, now: float, step_s: float, work_s: float, short: bool) -> float:
        """Return the cost as ``cost_s``, of a request that adds ``work_s`` to a step; the sum of both if the server is
        idle."""
        left_s = self._others_until - now
        if short and self.parks:
            ahead, long = self.waiting(now) if left_s > 0.0 else (self._short, self._long)
            if long:
                # The running slice ends first, and the long prefill waits for this whole step.
                return ahead + 3.0 * step_s + 2.0 * work_s
            return ahead + work_s + (2.0 * step_s if ahead else step_s)
        ahead = self._short + self._long
        if ahead:
            # The time since then was spent on this router's work; other routers' has been reduced by it already.
            ahead += step_s - (now - self._since)
            if ahead < 0.0:
                ahead = 0.0
        elif left_s > 0.0:
            ahead = step_s
        if left_s > 0.0:
            ahead += left_s
        return ahead + work_s + step_s
