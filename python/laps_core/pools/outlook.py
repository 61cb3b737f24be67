"""When a prefill server would answer a request: the work that is there before it, and its own."""

from __future__ import annotations

import math

from laps_core.latency.step import Coefficients
from laps_core.length import SHORT, ClassName
from laps_core.pools.arrivals import Arrivals
from laps_core.pools.pressure import Work
from laps_core.protocol import Assignment

START = Coefficients(alpha=0.0, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.0)
"""What a server is taken to need until it has been seen at work."""
MEMORY = 0.999
"""How much of what was learnt of a server's speed counts beside one more request (ratio)."""
ENOUGH = 8
"""Requests from which what was learnt is good enough to turn a request away for."""


class Learnt:
    """What a step takes on servers that do not say so: a line over the new tokens of requests that were alone there.

    One for all of them. With a line for each, the one that happens to look fastest would get the requests, and none
    alone any more that could put it right.
    """

    def __init__(self) -> None:
        self.model = START
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def enough(self) -> bool:
        """Whether it has been learnt from enough requests to rely on it."""
        return self._sums[0] > ENOUGH - 0.5

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a request of so many new tokens."""
        one = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        n, t, tt, y, ty = (MEMORY * a + b for a, b in zip(self._sums, one, strict=True))
        self._sums = n, t, tt, y, ty
        spread = n * tt - t * t
        slope = (n * ty - t * y) / spread if spread > 0.01 * n * tt else 0.0
        if not 0.0 < slope * t < y:
            slope = y / t
        self.model = Coefficients(0.0, slope, 0.0, 0.0, max(0.0, (y - slope * t) / n))


class Outlook:
    """Of one server, as one router sees it. Times are the caller's, one clock's (seconds).

    Requests are batched, so that a step's own time counts once for all of them. Where long prefills are parked for
    short ones, those wait for short ones only.
    """

    __slots__ = (
        "_alone", "_learnt", "_long", "_others_short_until", "_others_until", "_short", "_since", "arrivals", "done",
        "free_at", "own_model", "parks", "shared",
    )  # fmt: skip

    def __init__(self, learnt: Learnt) -> None:
        self.own_model: Coefficients | None = None
        """What a step takes there, as the server says; None: it does not."""
        self.parks = False
        """It is known to run LAPS: a long prefill there is parked while short ones run."""
        self.shared = False
        """Others' requests were seen to be at work there when it was last asked."""
        self.arrivals = Arrivals()
        self.free_at = -math.inf
        """From when on no work is known there; infinite while this router's is."""
        self.done = Work()
        """This router's work there that is done, since the start (seconds)."""
        self._learnt = learnt
        self._alone = False
        self._short = self._long = 0.0
        self._others_short_until = self._others_until = -math.inf
        """When others' work there is done, as far as it was told: the short, and after it all."""
        self._since = 0.0

    @property
    def model(self) -> Coefficients:
        """The server's own, or what this router has seen of others like it."""
        return self.own_model or self._learnt.model

    def enter(self, now: float, cls: ClassName, work_s: float) -> None:
        """This router sends it a request."""
        self.free_at = math.inf
        # Alone there: it is what the time to its first token teaches.
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
        """That request has its first token after so many new ``tokens``; 0: it needs none any more."""
        if tokens and self._alone and self.own_model is None and now > self._since:
            self._learnt.observe(tokens, now - self._since)
        self._since = now
        # Sums of floats do not come back to 0.0 by themselves.
        if cls == SHORT:
            self.done = Work(self.done.short + work_s, self.done.long)
            self._short = self._short - work_s if self._short - work_s > 1e-9 else 0.0
        else:
            self.done = Work(self.done.short, self.done.long + work_s)
            self._long = self._long - work_s if self._long - work_s > 1e-9 else 0.0
        self.free_at = math.inf if self._short or self._long else self._others_until

    def seen(self, others: bool) -> None:
        """Whether others' requests are at work there now, however little of them waits."""
        self.shared = others
        self._alone = self._alone and not others

    def told(self, now: float, short_s: float, long_s: float) -> None:
        """The server has said what work waits there: what is not this router's is others' (seconds)."""
        self._note(now, short_s - self._short, long_s - self._long)

    def told_others(self, now: float, pool: Assignment, seconds: float) -> None:
        """So much of others' work waits there; of which class is a guess by its ``pool``."""
        self._note(now, seconds, 0.0) if pool == SHORT else self._note(now, 0.0, seconds)

    def _note(self, now: float, short_s: float, long_s: float) -> None:
        self._others_short_until = now + max(0.0, short_s)
        self._others_until = self._others_short_until + max(0.0, long_s)
        self.free_at = math.inf if self._short or self._long else self._others_until
        self._alone = self._alone and self._others_until <= now

    def waiting(self, now: float) -> Work:
        """Work there (seconds)."""
        short_until, until = self._others_short_until, self._others_until
        if now >= until:
            return Work(self._short, self._long)
        if now >= short_until:
            return Work(self._short, self._long + (until - now))
        return Work(self._short + (short_until - now), self._long + (until - short_until))

    def first_s(self, now: float, new: int, cached: int, short: bool) -> float | None:
        """Until a request of so many tokens would have its first token, sent now (seconds); None where that is not
        known well enough: it is neither told nor learnt, or nothing is there, so that the request is one to learn
        from."""
        waits = self.waiting(now)
        if self.own_model is None and not (self._learnt.enough and any(waits)):
            return None
        cost_s = self.cost_s(now, new, cached, short)
        if short and self.parks and waits.long:
            # What it makes a long one lose is no time of its own.
            cost_s -= self.model.step_s + self.model.work_s(new, cached)
        return cost_s

    def cost_s(self, now: float, new: int, cached: int, short: bool) -> float:
        """Until a request of so many tokens would be answered, sent now, and how much later it makes a long one that
        it goes before (seconds)."""
        model = self.own_model or self._learnt.model
        return self.with_work_s(now, model.step_s, model.work_s(new, cached), short)

    def with_work_s(self, now: float, step_s: float, work_s: float, short: bool) -> float:
        """The same of a request that adds so much work to a step. Where no work is known it is their sum."""
        left_s = self._others_until - now
        if short and self.parks:
            ahead, long = self.waiting(now) if left_s > 0.0 else (self._short, self._long)
            if long:
                # The slice that runs ends first; and the long one waits for all of this step.
                return ahead + 3.0 * step_s + 2.0 * work_s
            return ahead + work_s + (2.0 * step_s if ahead else step_s)
        ahead = self._short + self._long
        if ahead:
            # The time since then went to its own work; others' has been faded by it already.
            ahead += step_s - (now - self._since)
            if ahead < 0.0:
                ahead = 0.0
        elif left_s > 0.0:
            ahead = step_s
        if left_s > 0.0:
            ahead += left_s
        return ahead + work_s + step_s
