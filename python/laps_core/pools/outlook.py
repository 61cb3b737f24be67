"""Prediction of when a prefill server would answer a request, from the work ahead of the request and its own work."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from laps_core.latency.step import Coefficients
from laps_core.length import SHORT, ClassName
from laps_core.pools.arrivals import Arrivals
from laps_core.pools.pressure import Work
from laps_core.protocol import Assignment

START = Coefficients(alpha=0.0, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.0)
"""Latency model of a server until requests have been measured."""
MEMORY = 0.999
"""Factor by which the learnt model's data decay per request."""
SLOWER = 8.0
"""Largest measured time, in multiples of the predicted time, that is learnt as it is."""
ENOUGH = 8
"""Measured requests from which the learnt model is good enough to refuse a request."""


class Learnt:
    """Latency model of servers that report none: the time of requests that ran alone, as a line over their new tokens.

    All such servers share it. With a model for each, the server that looks fastest by chance would get the requests,
    and the other servers would never be measured again.
    """

    def __init__(self) -> None:
        self.model = START
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def enough(self) -> bool:
        """Return True if enough requests were measured to rely on the model."""
        return self._sums[0] > ENOUGH - 0.5

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a request of ``tokens`` new tokens. A machine that stood still must not look slow for long."""
        if self.enough:
            seconds = min(seconds, SLOWER * (self.model.step_s + self.model.work_s(tokens, 0)))
        one = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        n, t, tt, y, ty = (MEMORY * a + b for a, b in zip(self._sums, one, strict=True))
        self._sums = n, t, tt, y, ty
        spread = n * tt - t * t
        slope = (n * ty - t * y) / spread if spread > 0.01 * n * tt else 0.0
        if not 0.0 < slope * t < y:
            slope = y / t
        self.model = Coefficients(0.0, slope, 0.0, 0.0, max(0.0, (y - slope * t) / n))


class Outlook:
    """Unfinished work of one server or rank, as one router knows it. Times are of the caller's clock (seconds).

    Requests are batched, so a step's own time counts once for all of them. If the server runs LAPS, the request with
    the least work goes first: of two requests, the longer one waits for the shorter one.
    """

    __slots__ = (
        "_alone", "_learnt", "_long", "_others_short_until", "_others_until", "_short", "_since", "_works", "arrivals",
        "done", "free_at", "own_model", "parks", "shared",
    )  # fmt: skip

    def __init__(self, learnt: Learnt) -> None:
        self.own_model: Coefficients | None = None
        """Latency model that the server reports; None if it reports none."""
        self.parks = False
        """True if the server runs LAPS, which parks a long prefill while short requests run."""
        self.shared = False
        """True if the server computed requests of other routers at the last poll."""
        self.arrivals = Arrivals()
        self.free_at = -math.inf
        """Time from which the server has no known work; infinite while this router has requests there."""
        self.done = Work()
        """Finished work of this router's requests at the server, by class (seconds)."""
        self._learnt = learnt
        self._alone = False
        self._short = self._long = 0.0
        self._works: list[float] = []
        """Work of each of this router's requests at the server (seconds), in ascending order."""
        self._others_short_until = self._others_until = -math.inf
        """Times at which the known short work, and then all known work, of other routers is done."""
        self._since = 0.0

    @property
    def model(self) -> Coefficients:
        """Return the reported latency model, or else the learnt one."""
        return self.own_model or self._learnt.model

    def enter(self, now: float, cls: ClassName, work_s: float) -> None:
        """Add a request that this router sends to the server."""
        self.free_at = math.inf
        # The time to first token of a request that runs alone measures the server.
        self._alone = not (self.shared or any(self.waiting(now)))
        ahead_s = self._short + self._long
        # Time beyond that predicted for the work in flight must not count as done of this request, too.
        self._since = max(self._since, now - ahead_s) if ahead_s else now
        if self.arrivals.lengths is None:
            self.arrivals.add(now, cls, work_s)
        insort(self._works, work_s)
        if cls == SHORT:
            self._short += work_s
        else:
            self._long += work_s

    def leave(self, now: float, cls: ClassName, work_s: float, tokens: int) -> None:
        """Remove a request whose first token came after ``tokens`` new tokens; 0: the request failed."""
        if tokens and self._alone and self.own_model is None and now > self._since:
            self._learnt.observe(tokens, now - self._since)
        self._since = now
        del self._works[bisect_left(self._works, work_s)]
        # Rounding errors would keep the sum of floats from returning to 0.0.
        if cls == SHORT:
            self.done = Work(self.done.short + work_s, self.done.long)
            self._short = self._short - work_s if self._short - work_s > 1e-9 else 0.0
        else:
            self.done = Work(self.done.short, self.done.long + work_s)
            self._long = self._long - work_s if self._long - work_s > 1e-9 else 0.0
        self.free_at = math.inf if self._short or self._long else self._others_until

    def set_shared(self, others: bool) -> None:
        """Set whether the server computes requests of other routers now, even if hardly any of them waits."""
        self.shared = others
        self._alone = self._alone and not others

    def record_work(self, now: float, short_s: float, long_s: float) -> None:
        """Take in the server's unfinished work (seconds): the excess over this router's own is other routers' work."""
        self._set_others_work(now, short_s - self._short, long_s - self._long)

    def record_others_work(self, now: float, pool: Assignment, seconds: float) -> None:
        """Take in the waiting work of other routers (seconds). Its class is unknown: guess it from ``pool``."""
        self._set_others_work(now, seconds, 0.0) if pool == SHORT else self._set_others_work(now, 0.0, seconds)

    def _set_others_work(self, now: float, short_s: float, long_s: float) -> None:
        self._others_short_until = now + max(0.0, short_s)
        self._others_until = self._others_short_until + max(0.0, long_s)
        self.free_at = math.inf if self._short or self._long else self._others_until
        self._alone = self._alone and self._others_until <= now

    def waiting(self, now: float) -> Work:
        """Return the known unfinished work at the server, by class (seconds)."""
        short_until, until = self._others_short_until, self._others_until
        if now >= until:
            return Work(self._short, self._long)
        if now >= short_until:
            return Work(self._short, self._long + (until - now))
        return Work(self._short + (short_until - now), self._long + (until - short_until))

    def first_s(self, now: float, new: int, cached: int, short: bool) -> float | None:
        """Return the predicted time to first token of a request sent now (seconds). None if the server reports no model
        and too few requests were measured, or if such a server is idle, so that this request can be measured."""
        if self.own_model is None and not (self._learnt.enough and any(self.waiting(now))):
            return None
        model = self.model
        return self.costs_s(now, model.step_s, model.work_s(new, cached), short)[0]

    def cost_s(self, now: float, new: int, cached: int, short: bool) -> float:
        """Return the predicted time to first token of a request sent now, plus the delay of others (seconds)."""
        model = self.own_model or self._learnt.model
        return sum(self.costs_s(now, model.step_s, model.work_s(new, cached), short))

    def costs_s(self, now: float, step_s: float, work_s: float, short: bool) -> tuple[float, float]:
        """Return the predicted time to first token of a request sent now that adds ``work_s`` to a step of ``step_s``,
        and the total delay of the requests that will wait for its work (seconds)."""
        works, left_s = self._works, self._others_until - now
        if not works and left_s <= 0.0:
            return step_s + work_s, 0.0
        ahead_s, behind = 0.0, 0
        preempts = short and self.parks and self._long > 0.0
        if works:
            # The time since ``_since`` went into this router's work; other routers' work is reduced by it already.
            first = bisect_left(works, work_s) if self.parks else len(works)
            ahead_s = max(0.0, sum(works[:first]) - (now - self._since))
            behind = len(works) - first
        if left_s > 0.0:
            if short and self.parks:
                # Other routers' long work counts as one request, because their number is unknown.
                short_s = max(0.0, self._others_short_until - now)
                if short_s < left_s:
                    behind, preempts = behind + 1, True
                left_s = short_s
            ahead_s += left_s
        # A short request that preempts a long one delays it by a whole step. Work can be infinite, so no 0 times it.
        delay_s = (behind * work_s if behind else 0.0) + (step_s if preempts else 0.0)
        # The running step, or its running slice, ends first.
        return ahead_s + 2.0 * step_s + work_s, delay_s
