"""Baseline policy ``{"preset": "paper"}``: LAPS as it was published (LAPS, s3.1).

Short requests go before long prompts whenever a short batch is ready. A batch has one class. The window is Algorithm 1
as written. Long prompts run one at a time, in order of arrival, in chunks of one size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.policy.hold import Predict, Window
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import DecodeStep, Plan, Running, Waiting

W_MIN_S = 0.5e-3
"""W_min: shortest window (seconds)."""
DELTA_S = 1e-3
"""delta: subtracted from the slack when the window is computed (seconds)."""
_HALF_LIFE_S = 1.0


class Rate:
    """Arrivals per second over the last second or two. Times are seconds of one clock, and may go backwards."""

    def __init__(self) -> None:
        self._recent, self._seen_s = 0.0, -math.inf

    def add(self, now: float, n: int) -> None:
        """Count `n` requests that arrived at `now`."""
        self.at(now)
        self._recent += n

    def at(self, now: float) -> float:
        """Return the arrivals per second at `now`; without arrivals the rate fades to 0."""
        if now > self._seen_s:
            self._recent *= 0.5 ** ((now - self._seen_s) / _HALF_LIFE_S)
            self._seen_s = now
        return self._recent * math.log(2.0) / _HALF_LIFE_S


class PaperWindow(Window):
    """Algorithm 1 to the letter: a batch is held until the window W ends or it has D requests, whether or not more
    requests are expected. If a batch fills to D, W becomes the time that it took; if not, D becomes its depth."""

    def __init__(self, config: LapsConfig, predict: Predict) -> None:
        super().__init__(config, predict)
        self._window_s, self._depth = self._w_max_s, self._cap
        """W (seconds) and D (requests)."""
        self._rate = Rate()

    def record_arrivals(self, now: float, n: int = 1, blind_since: float | None = None) -> None:
        super().record_arrivals(now, n, blind_since)
        self._rate.add(now, n)

    def most_at_once(self, shorts: Sequence[Waiting]) -> int:
        return len(shorts)

    def _judge(
        self, now: float, shorts: Sequence[Waiting], picked: Sequence[int], slack: float, token_budget: int
    ) -> str | float:
        k = len(picked)
        if reason := self._leaves_at_once(k, self._depth, shorts, slack, token_budget):
            return reason
        window_s = self._window_s
        if slack < math.inf:
            filled_s = (self._depth - k) / max(self._rate.at(now), 1e-9)
            window_s = self._clipped(min(max(0.0, slack - DELTA_S), filled_s))
        end = min(now, self._held_since) + window_s
        return "window" if now >= end else end

    def record_dispatch(self, now: float, depth: int, waited_s: float, reason: str, late: int = 0) -> None:
        tau_s = now - self._idle_since(now)
        super().record_dispatch(now, depth, waited_s, reason, late)
        if depth >= self._depth:
            self._window_s = self._clipped(tau_s)
        else:
            self._depth = depth

    def status(self) -> dict[str, Any]:
        return {**super().status(), "window_ms": self._window_s * 1e3, "depth": self._depth}

    def _clipped(self, seconds: float) -> float:
        return min(max(seconds, W_MIN_S), self._w_max_s)


class PaperPacer(Pacer):
    """A pacer without gap, guard, slices and shared steps."""

    def __init__(self, config: LapsConfig, **how: Any) -> None:
        """Take the arguments of ``Pacer``; ``layers`` is ignored, because there are no slices."""
        super().__init__(config, **{**how, "layers": 0})
        self.window = PaperWindow(config, self.model.predict)

    def plan(self, now: float, shorts: Sequence[Waiting], longs: Sequence[Waiting], **_: Any) -> Plan:
        """Plan with short requests strictly first (see Pacer). While the window holds a short batch, long work runs."""
        if not shorts:
            self.window.record_empty_queue()
        plan = self._shorts(now, shorts, self.sizes.budget)
        if not longs:
            return plan
        # One prompt is in progress at a time.
        first = min(range(len(longs)), key=lambda i: (not longs[i].started, longs[i].priority, longs[i].since_s))
        both = self.longs.cut(plan, longs, [first], self.sizes.budget // self.sizes.unit * self.sizes.unit)
        both = both._replace(held="", account=both.account._replace(oldest=True, until_s=math.inf))
        # If memory is missing for the short requests, the long prompt goes on.
        return both._replace(order=(SHORT, LONG)) if plan.order else both

    def decision_time_s(self, now: float, running: Sequence[Running], step: DecodeStep | None = None) -> float:
        """Return `now`: the next decision is made at once (see ``Pacer``)."""
        return now


def pacer(config: LapsConfig, **how: Any) -> Pacer:
    """Return the policy that ``config`` selects. ``how``: arguments of ``Pacer``."""
    return (Pacer if config.preset is None else PaperPacer)(config, **how)
