"""AWD, Adaptive Wait-Depth: when a batch of short prefills leaves (LAPS, s3.1-3.2, Alg. 1).

Holding a batch back idles the device, so it must pay. Two kinds of expected traffic (see ``arrivals``) have each their
own test. ``saved`` is what one merge saves: the predicted time of two batches less that of their union.

- Clients due back from the last batch (closed loop): if all of them fit into this batch, one batch replaces two
  in this cycle and in every one after it. Holding pays while the device idles for less than ``saved``.
- The rest of a burst: holding pays when the sum of latencies falls, that is when m requests that each gain ``saved``
  outweigh k + m that each lose the time held.

Behind a backlog independent arrivals share the next batch anyhow, and holding for them only lengthens the cycle: they
are not waited for. Fewer than one expected arrival never is, so a lone sequential user is never held. Predictions fail:
beyond what holds have saved they may cost a small share of the time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from laps_core.config import LapsConfig
from laps_core.length import SHORT
from laps_core.policy.arrivals import Arrivals
from laps_core.policy.types import Account, Plan, Waiting
from laps_core.statistics import ShortBatches

Predict = Callable[[Sequence[tuple[int, int]]], "float | None"]
"""(new, history) tokens of each request of a step -> seconds, or None when nothing is known."""

SIGMA_S = 2e-3
"""sigma: a batch leaves at once when its smallest slack is this small (seconds): what a step may last longer than
predicted."""
HEAD_MAX = 4.0
"""T_max: the head of the short queue is never held longer than this many times W_max."""
_HORIZON_WINDOWS = 4
_ONE = 0.9
"""Expected arrivals that count as one; a smoothed share never quite reaches it."""
TICK_S = 20e-6
"""A shorter wait is none."""
TRIAL = 1.0 / 64.0
"""Share of the time that holds may cost beyond what they save (0..1): so much is tried."""


class Hold(NamedTuple):
    """Requests and saving for which the window last waited."""

    depth: int
    """Requests that were there."""
    saving_s: float


class Window:
    """The state machine of one short queue. One per scheduler; on several ranks only the first one's is asked.

    The caller reports ``arrived``, ``dispatched`` and ``completed``, and asks ``decide`` whenever a short batch could
    start. Times are seconds of one clock.

    W and D of Algorithm 1 are W_max and ``wait_max_batch``, always: that does no harm, for a wait needs an expected
    arrival.
    """

    def __init__(self, config: LapsConfig, predict: Predict) -> None:
        """``predict``: how long a step takes."""
        self._predict = predict
        self._fixed = config.window == "fixed"
        self._w_max_s = config.wait_window_ms / 1e3
        self._cap = config.wait_max_batch
        self._arrivals = Arrivals(_HORIZON_WINDOWS * self._w_max_s, self._w_max_s)
        self._started: deque[float] = deque(maxlen=8)
        self._service_s = 0.0
        self._held_since = math.inf
        """Infinite while nothing is held."""
        self._hold: Hold | None = None
        self._credit_s = self._w_max_s
        """Time that a hold may cost: savings of earlier holds and TRIAL of the time, less the cost of earlier holds."""
        self._credited_s = math.inf
        self._mode = "off" if self._w_max_s == 0.0 else "fixed" if self._fixed else "deadline-free"
        self._statistics = ShortBatches()

    # -- events

    def arrived(self, now: float, n: int = 1, blind_since: float | None = None) -> None:
        """``n`` short requests arrived at ``now``, their true arrival time where it is known.

        Where it is not, the first poll after a batch gives ``blind_since``, the time of the poll before that batch.
        """
        self._arrivals.arrived(now, n, blind_since)

    def dispatched(self, now: float, depth: int, waited_s: float, reason: str, late: int = 0) -> None:
        """A batch of ``depth`` short requests starts at ``now``; the rest is from the plan that said so."""
        self._settle(now, now - self._idle_since(now), depth)
        self._arrivals.dispatched(now, depth)
        self._started.append(now)
        self._held_since, self._hold = math.inf, None
        self._statistics.left(depth, waited_s, reason, late)

    def completed(self, now: float, n: int) -> None:
        """A batch of ``n`` short requests is done; call it before its clients can know."""
        self._arrivals.completed(now, n)
        if self._started:
            took = now - self._started.popleft()
            self._service_s = took if self._service_s == 0.0 else self._service_s + 0.25 * (took - self._service_s)

    def nothing_waits(self) -> None:
        """No short request waits (those held back were aborted, say): a later one begins a hold of its own."""
        self._arrivals.waiting(0)
        self._held_since, self._hold = math.inf, None

    # -- decisions

    def decide(
        self, now: float, shorts: Sequence[Waiting], *, token_budget: int, late_last: bool = True,
        contended: bool = False,
    ) -> Plan:  # fmt: skip
        """The batch that leaves now, or how long to wait; where something arrives before, decide again.

        ``shorts``: all that wait (not empty), in the order to serve them. ``token_budget``: new tokens one batch may
        hold; the first request is taken whatever its size. ``late_last``: those that can no longer make their deadline
        go behind the others. ``contended``: long work waits or is paused, so that nothing is held.
        """
        self._arrivals.waiting(len(shorts))
        picked, slacks = self._filled(now, shorts, token_budget, late_last)
        held_since = min(now, self._held_since)
        verdict: str | float = "preempt"
        if not contended:
            # One whose time ran out while it was held, its waker being late, counts: more waiting is of no use to it.
            held = (max(held_since, s.since_s) - now for s in shorts)
            slack = min((s for s, spent in zip(slacks, held, strict=True) if spent <= s < math.inf), default=math.inf)
            verdict = self._judge(now, shorts, picked, slack, token_budget)
        if isinstance(verdict, str):
            late = sum(slacks[i] < 0.0 for i in picked)
            return Plan((SHORT,), tuple(picked), account=Account(verdict, now - held_since, late))
        self._held_since = held_since
        return Plan((), held="window", account=Account(until_s=verdict))

    def _filled(
        self, now: float, shorts: Sequence[Waiting], token_budget: int, late_last: bool
    ) -> tuple[list[int], list[float]]:
        """(Those that fit: late ones last, the first always; the slack of each of ``shorts`` in seconds.)"""
        slacks = self._slacks(now, shorts, token_budget)
        order = sorted(range(len(shorts)), key=lambda i: late_last and slacks[i] < 0.0)
        picked, room = order[:1], token_budget - shorts[order[0]].tokens
        for i in order[1:]:
            if shorts[i].tokens <= room:
                picked.append(i)
                room -= shorts[i].tokens
        return picked, slacks

    def _judge(
        self, now: float, shorts: Sequence[Waiting], picked: Sequence[int], slack: float, token_budget: int
    ) -> str | float:
        """The reason to dispatch, or until when to wait."""
        if self._w_max_s and not self._fixed:
            self._mode = "sla" if slack < math.inf else "deadline-free"
        k = len(picked)
        if reason := self._leaves_at_once(k, self._cap, shorts, slack, token_budget):
            return reason
        since = self._idle_since(now)
        head_end = min(now, self._held_since) + HEAD_MAX * self._w_max_s
        # What is left below a tick is over: a timer may wake its sleeper that much early.
        if now > head_end - TICK_S:
            return "head_of_line"
        end = (min(s.since_s for s in shorts) if self._fixed else since) + self._w_max_s
        if now > end - TICK_S:
            return "window"
        last = min(end, now + slack - SIGMA_S, head_end)
        until = last if self._fixed else self._worth(now, since, last, shorts, k)
        return "idle" if until is None or until - now < TICK_S else until

    def _leaves_at_once(
        self, k: int, depth: int, shorts: Sequence[Waiting], slack: float, token_budget: int
    ) -> str | None:
        """Why a batch of ``k`` of ``shorts`` leaves whatever is expected; None = it may be held. ``depth``: D."""
        if self._w_max_s == 0.0:
            return "idle"
        if k >= depth:
            return "depth"
        if slack <= SIGMA_S:
            return "slack"
        return "tokens" if k < len(shorts) or sum(s.tokens for s in shorts) >= token_budget else None

    def _idle_since(self, now: float) -> float:
        """Since when the hold costs: waiting while a short batch still runs is free (overlap scheduling)."""
        return max(min(now, self._held_since), self._arrivals.completed_s)

    def _worth(self, now: float, since: float, last: float, shorts: Sequence[Waiting], k: int) -> float | None:
        """Until when to wait, no longer than ``last``, or None if waiting does not pay."""
        if self._credit_s < 0.0:
            return None
        due = self._arrivals.returning(now)
        if due.requests >= _ONE and k + due.requests < self._cap + 0.5:
            saved = self._saving(shorts, due.requests)
            # How soon they come may be unknown: then try for as long as it can pay. The outcome teaches.
            until = min(last, since + saved) if due.by_s == math.inf else due.by_s
            if until <= last and until - since <= saved:
                self._hold = Hold(k, saved)
                return until
        due = self._arrivals.following(now)
        if due.requests >= _ONE:
            m = min(due.requests, self._cap - k)
            until = last if due.by_s == math.inf else min(last, now + (due.by_s - now) * m / due.requests)
            saved = self._saving(shorts, m)
            if m * saved > (k + m) * (until - now):
                self._hold = Hold(k, saved)
                return until
        return None

    def _saving(self, shorts: Sequence[Waiting], more: float) -> float:
        """Device time saved by running ``more`` requests like these in their batch instead of the next (seconds).

        While nothing can be predicted it is taken to be half a recent batch, at most W_max.
        """
        here = [(s.tokens, s.history) for s in shorts]
        others = [here[i % len(here)] for i in range(max(1, round(more)))]
        apart_a, apart_b, together = map(self._predict, (here, others, here + others))
        if apart_a is None or apart_b is None or together is None:
            return min(self._w_max_s, 0.5 * self._service_s)
        return max(0.0, apart_a + apart_b - together)

    def _slacks(self, now: float, shorts: Sequence[Waiting], token_budget: int) -> list[float]:
        """Per request: deadline - now - service of the whole batch; infinite without a deadline (seconds).

        The service is S^, predicted, else the smoothed time of recent short batches. Of one batch, not of all that
        wait: under a backlog the first of them can still make it.
        """
        if all(s.deadline_s is None for s in shorts):
            return [math.inf] * len(shorts)
        fitting = max(1, bisect_right(list(accumulate(s.tokens for s in shorts)), token_budget))
        known = self._predict([(s.tokens, s.history) for s in shorts[:fitting]])
        served = now + (self._service_s if known is None else known)
        return [math.inf if s.deadline_s is None else s.deadline_s - served for s in shorts]

    def _settle(self, now: float, idle_s: float, depth: int) -> None:
        """Books what a hold has cost, and what it has saved where somebody came.

        Bound: of any time T, holds cost at most T TRIAL + 2 W_max more than they are predicted to have saved.
        """
        earned_s = TRIAL * max(0.0, now - self._credited_s)
        self._credited_s = now
        if self._hold and idle_s > 0.0:
            earned_s += (self._hold.saving_s if depth > self._hold.depth else 0.0) - idle_s
        self._credit_s = min(self._w_max_s, self._credit_s + earned_s)

    def status(self) -> dict[str, Any]:
        """Return the entry on the window in /laps_status (JSON-ready)."""
        return {
            "mode": self._mode,
            "window_ms": self._w_max_s * 1e3,
            "window_max_ms": self._w_max_s * 1e3,
            "depth": self._cap,
            "depth_max": self._cap,
            **self._statistics.status(),
            "returning_share": self._arrivals.share,
            "service_ms": self._service_s * 1e3,
        }
