"""AWD, Adaptive Wait-Depth: when a batch of short prefills leaves (LAPS, s3.1-3.2, Alg. 1).

A hold idles the device, so it must pay. If the rest of a group is expected (see ``arrivals``), one batch replaces two.
This saves the predicted time of two such batches, less that of both in one. A batch is held until the device has idled
for the share PAYS of this saving, if the rest arrives by then with a probability above PAYS: as long as earlier groups
predict the arrivals, holds save more than they cost.

Requests that do not fit into the batch are not waited for: behind a backlog they share the next batch anyway.

The first requests of a crowd do not wait for the work of all. If n requests of s seconds each wait, and a step costs
F more, batches of sqrt(n F / s) requests have the least mean wait. Batches are AHEAD times as large, because more
requests will arrive.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from laps_core.config import LapsConfig
from laps_core.length import SHORT
from laps_core.policy.arrivals import Groups
from laps_core.policy.exchange import AHEAD
from laps_core.policy.types import Account, Plan, Waiting
from laps_core.statistics import ShortBatches

Predict = Callable[[Sequence[tuple[int, int]]], "float | None"]
"""Function from the (new, history) tokens of each request of a step to the predicted seconds; None if unknown."""

SIGMA_S = 2e-3
"""sigma: a batch leaves at once if its smallest slack is at most this (seconds). A step can last this much longer than
predicted."""
PAYS = 0.5
"""Share of the saved time that a hold may take; also the probability of the saving that must be exceeded (0..1)."""


class Window:
    """State machine of the short queue, one per scheduler. With several ranks only that of the leading rank is asked.

    The caller calls ``record_arrivals``, ``record_dispatch`` and ``record_completion``, and asks ``decide`` whenever a
    short batch could start. Times are seconds of one clock.

    W and D of Algorithm 1 are always W_max and ``wait_max_batch``, because a batch is held only for expected arrivals.

    Bound (AWD): in one hold the device idles for at most W_max, and for at most PAYS of the least batch time. So
    the device idles for at most a third of the time, whatever arrives.
    """

    def __init__(self, config: LapsConfig, predict: Predict) -> None:
        """``predict``: predicts the time of a step."""
        self._predict = predict
        self._fixed = config.window == "fixed"
        self._w_max_s = config.wait_window_ms / 1e3
        self._cap = config.wait_max_batch
        self._returning, self._following = Groups(self._w_max_s), Groups(self._w_max_s)
        self._waiting = 0
        self._started: deque[tuple[float, int]] = deque(maxlen=8)
        """Start time and depth of each running batch."""
        self._service_s = 0.0
        self._held_since = math.inf
        """Start of the hold; infinite while nothing is held."""
        self._mode = "off" if self._w_max_s == 0.0 else "fixed" if self._fixed else "deadline-free"
        self._statistics = ShortBatches()

    # -- events

    def record_arrivals(self, now: float, n: int = 1, blind_since: float | None = None) -> None:
        """Record that ``n`` short requests arrived at ``now``, their true arrival time if known.

        If unknown, the first poll after a batch gives ``blind_since``, the time of the poll before that batch.
        """
        if n <= 0:
            return
        earliest_s = now if blind_since is None else blind_since
        if not self._waiting and not self._started and earliest_s >= self._returning.at_s:
            self._following.begin(now, max(1, self._cap - 1))
            self._following.add(n - 1, now, now)
        else:
            self._following.add(n, earliest_s, now)
        self._returning.add(n, earliest_s, now)
        self._waiting += n

    def record_dispatch(self, now: float, depth: int, waited_s: float, reason: str, late: int = 0) -> None:
        """Record that a batch of ``depth`` short requests starts at ``now``. The other arguments are from its plan."""
        self._started.append((now, depth))
        self._waiting = max(0, self._waiting - depth)
        self._held_since = math.inf
        self._statistics.record_batch(depth, waited_s, reason, late)

    def record_completion(self, now: float, n: int) -> None:
        """Record that a batch of ``n`` short requests is done; call before the clients can know."""
        self._returning.begin(now, max(1, n))
        if self._started:
            took = now - self._started.popleft()[0]
            self._service_s = took if self._service_s == 0.0 else self._service_s + 0.25 * (took - self._service_s)

    def record_empty_queue(self) -> None:
        """End the hold because no short request waits (all were aborted, say): a later request starts a new hold."""
        self._waiting = 0
        self._held_since = math.inf

    # -- decisions

    def decide(
        self,
        now: float,
        shorts: Sequence[Waiting],
        *,
        token_budget: int,
        contended: bool = False,
        free_s: float = -math.inf,
        lead_s: float = 0.0,
    ) -> Plan:
        """Return the batch that leaves now, or the time until which to wait; decide again if a request arrives before.

        ``shorts``: all waiting short requests (not empty), in service order. ``token_budget``: new tokens that a batch
        may hold; the first request is taken whatever its size. ``contended``: long work waits or is paused, so nothing
        is held. ``free_s``: time at which the device finishes the running work. ``lead_s``: time of a launch, which is
        hidden until then.
        """
        self._waiting = len(shorts)
        picked, room = [0], token_budget - shorts[0].tokens
        most = len(shorts) if contended else self.most_at_once(shorts)
        for i, waiting in enumerate(shorts[1:], 1):
            if waiting.tokens <= room and len(picked) < most:
                picked.append(i)
                room -= waiting.tokens
        slacks = self._slacks(now, shorts, token_budget)
        held_since = min(now, self._held_since)
        verdict: str | float = "preempt"
        if not contended:
            # A request whose slack ran out during the hold (late wake-up) counts, too: waiting longer does not help.
            held = (max(held_since, s.since_s) - now for s in shorts)
            slack = min((s for s, spent in zip(slacks, held, strict=True) if spent <= s < math.inf), default=math.inf)
            verdict = self._judge(now, shorts, picked, slack, token_budget)
            if verdict == "idle" and self._next_pays(now, shorts, len(picked), slack, free_s, lead_s):
                verdict = free_s
        if isinstance(verdict, str):
            late = sum(slacks[i] < 0.0 for i in picked)
            crowd = most < len(shorts)
            return Plan((SHORT,), tuple(picked), split=crowd, account=Account(verdict, now - held_since, late))
        self._held_since = held_since
        return Plan((), held="window", account=Account(until_s=verdict))

    def most_at_once(self, shorts: Sequence[Waiting]) -> int:
        """Return how many of these requests should leave in one batch."""
        fixed_s, all_s = self._predict([(1, 0)]), self._predict([(s.tokens, s.history) for s in shorts])
        if fixed_s is None or all_s is None or all_s <= fixed_s:
            return len(shorts)
        return min(len(shorts), math.ceil(AHEAD * len(shorts) * math.sqrt(fixed_s / (all_s - fixed_s))))

    def _judge(
        self, now: float, shorts: Sequence[Waiting], picked: Sequence[int], slack: float, token_budget: int
    ) -> str | float:
        """Return the reason to dispatch, or the time until which to wait."""
        if self._w_max_s and not self._fixed:
            self._mode = "sla" if slack < math.inf else "deadline-free"
        k = len(picked)
        if reason := self._leaves_at_once(k, self._cap, shorts, slack, token_budget):
            return reason
        since = self._idle_since(now)
        end = (min(s.since_s for s in shorts) if self._fixed else since) + self._w_max_s
        if now >= end:
            return "window"
        last = min(end, now + slack - SIGMA_S)
        until = last if self._fixed else self._worth(now, since, last, shorts, k)
        return until if until > now else "idle"

    def _leaves_at_once(
        self, k: int, depth: int, shorts: Sequence[Waiting], slack: float, token_budget: int
    ) -> str | None:
        """Return why ``k`` of ``shorts`` leave without a hold; None if the batch can be held. ``depth``: D."""
        if self._w_max_s == 0.0:
            return "idle"
        if k >= depth:
            return "depth"
        if slack <= SIGMA_S:
            return "slack"
        return "tokens" if k < len(shorts) or sum(s.tokens for s in shorts) >= token_budget else None

    def _idle_since(self, now: float) -> float:
        """Return the start of the costly part of a hold: waiting is free while a short batch runs (overlap loop)."""
        return max(min(now, self._held_since), self._returning.at_s)

    def _worth(self, now: float, since: float, last: float, shorts: Sequence[Waiting], k: int) -> float:
        """Return the time until which to wait, at most ``last``; ``now`` if waiting does not pay."""
        until = min(last, since + PAYS * self._saved_s(shorts))
        # While a batch runs, the rest of a burst follows the requests in that batch, not the waiting requests.
        groups = (self._returning,) if self._started else (self._returning, self._following)
        return until if any(g.chance(now, until, self._cap - k) > PAYS for g in groups) else now

    def _next_pays(
        self, now: float, shorts: Sequence[Waiting], k: int, slack: float, free_s: float, lead_s: float
    ) -> bool:
        """Return True if these requests should wait for the clients of the running short batch: two groups that take
        turns become one."""
        if self._fixed or not self._started or free_s <= now:
            return False
        within_s = min(self._w_max_s, PAYS * (self._saved_s(shorts) - lead_s), now + slack - SIGMA_S - free_s)
        return within_s > 0.0 and self._returning.chance_of_next(self._started[-1][1], within_s, self._cap - k) > PAYS

    def _saved_s(self, shorts: Sequence[Waiting]) -> float:
        """Return the time saved if one batch replaces two batches like this one (seconds); -infinity if unknown."""
        here = [(s.tokens, s.history) for s in shorts]
        apart_s, together_s = self._predict(here), self._predict(here * 2)
        return -math.inf if apart_s is None or together_s is None else 2.0 * apart_s - together_s

    def _slacks(self, now: float, shorts: Sequence[Waiting], token_budget: int) -> list[float]:
        """Return for each request: deadline - now - service of the batch (seconds); infinite without a deadline.

        The service is S^, predicted, else the smoothed time of recent short batches. One batch counts, not all waiting
        requests: under a backlog the first requests can still be in time.
        """
        if all(s.deadline_s is None for s in shorts):
            return [math.inf] * len(shorts)
        fitting = max(1, bisect_right(list(accumulate(s.tokens for s in shorts)), token_budget))
        known = self._predict([(s.tokens, s.history) for s in shorts[:fitting]])
        served = now + (self._service_s if known is None else known)
        return [math.inf if s.deadline_s is None else s.deadline_s - served for s in shorts]

    def status(self) -> dict[str, Any]:
        """Return the entry on the window in /laps_status (JSON-ready)."""
        return {
            "mode": self._mode,
            "window_ms": self._w_max_s * 1e3,
            "window_max_ms": self._w_max_s * 1e3,
            "depth": self._cap,
            "depth_max": self._cap,
            **self._statistics.status(),
            "service_ms": self._service_s * 1e3,
        }
