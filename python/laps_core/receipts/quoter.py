"""Quotes of one scheduler: sums of waiting work, a quote for each arriving request, and the outcome of each quote."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from laps_core.config import LapsConfig
from laps_core.length import CLASSES, LONG, SHORT, ClassName
from laps_core.policy.fairness import LATE
from laps_core.policy.order import LEAST_WORK
from laps_core.policy.pacer import Pacer
from laps_core.receipts.backlog import Backlog, work_s
from laps_core.receipts.calibration import Calibration, Side, side_of
from laps_core.receipts.quote import QuoteState, bound_s, predict

_SMOOTH = 0.05
"""Weight of the newest request in the average time before the queue (0..1)."""
KINDS = 6


@dataclass(slots=True)
class Quoted:
    """Quote of a request. Times are seconds since the request's arrival, unless the text says otherwise."""

    at_s: float
    """Time of the quote (the caller's clock)."""
    waited_s: float
    """Time that the request had waited when it was quoted."""
    cls: ClassName
    seconds: float
    """Predicted time after the quote, before calibration."""
    kind: int
    low_s: float
    median_s: float
    high_s: float
    bound_s: float | None
    """Longest time; None = no bound."""


@dataclass(slots=True)
class Device:
    """State of the device, as its scheduler knows it (seconds)."""

    left_s: float = 0.0
    """Time until the device can take another batch."""
    under_way: tuple[float, ...] = ()
    """Time that each long batch on the device still needs."""


class Quoter:
    """Keeps the sums, quotes and calibrates. Each event takes constant time, however many requests wait."""

    def __init__(self, config: LapsConfig, pacer: Pacer, now: float, *, guaranteed: bool = True) -> None:
        """`guaranteed`: True if the guard's share is guaranteed: no data-parallel ranks that plan together, no
        priorities, no decode steps."""
        self._config, self._pacer = config, pacer
        self._share = config.guard if guaranteed and config.order == LEAST_WORK and config.preset is None else 0.0
        self._deadlines = config.ttft_slo_ms is not None
        self.backlog = Backlog(now)
        self.calibration = Calibration()
        self.counts: dict[ClassName, dict[Side, int]] = {c: {"inside": 0, "below": 0, "above": 0} for c in CLASSES}
        """Number of outcomes so far."""
        self.beyond_bound = 0
        """Number of outcomes that were longer than their bound."""
        self._before_s: float | None = None
        self._longest_short_s = 0.0

    # -- events

    def quote_arrival(
        self, now: float, key: Hashable, new: int, cached: int, cls: ClassName, device: Device, *,
        waited_s: float = 0.0, due: bool = False,
    ) -> Quoted | None:  # fmt: skip
        """Quote a request that enters the queue, and count its work from now on; None while step times are unknown.
        `waited_s`: time since its arrival. `due`: True if it has a deadline."""
        # A prompt that is too late for its deadline lowers the guard's share, also for prompts behind it.
        self._deadlines = self._deadlines or due
        state = self.state(now, device, short=cls == SHORT)
        if state is None:
            return None
        smooth = 1.0 if self._before_s is None else _SMOOTH
        self._before_s = (self._before_s or 0.0) + smooth * (waited_s - (self._before_s or 0.0))
        found = predict(state, new, cached, cls)
        self.update_waiting(key, cls, new, cached)
        self.backlog.count_arrival(now, cls, work_s(state.model, new, cached, state.chunk), new + cached)
        factors = self.calibration.factors(cls, found.kind)
        bound = bound_s(state, new, cached) if cls == LONG else None
        top = math.inf if bound is None else bound
        low, median, high = (waited_s + min(f * found.seconds, top) for f in factors)
        whole = None if bound is None else waited_s + bound
        return Quoted(now, waited_s, cls, found.seconds, found.kind, low, median, high, whole)

    def update_waiting(self, key: Hashable, cls: ClassName, new: int, cached: int) -> None:
        """Set the part of a request that waits: `new` tokens, after `cached` tokens."""
        model = self._pacer.model.coefficients
        if model is not None:
            self.backlog.set_waiting(key, cls, work_s(model, new, cached, self._pacer.sizes.budget), new)

    def record_launch(self, key: Hashable, left: int, cached: int) -> None:
        """Record that a part of a request goes to the device: `left` new tokens still wait, after `cached` tokens."""
        if left > 0:
            self.update_waiting(key, LONG, left, cached)
        else:
            self.backlog.remove(key)

    def record_batch(self, cls: ClassName, seconds: float) -> None:
        # The first batches may compile kernels.
        if cls == SHORT and self._pacer.model.fitted:
            self._longest_short_s = max(self._longest_short_s, seconds)

    def record_outcome(self, now: float, quoted: Quoted) -> Side:
        """Record that a quoted request has its first token, and return its position relative to the interval."""
        took_s = now - quoted.at_s
        measured_s = quoted.waited_s + took_s
        side = side_of(measured_s, quoted.low_s, quoted.high_s)
        self.calibration.observe(quoted.cls, quoted.kind, quoted.seconds, took_s, side)
        self.counts[quoted.cls][side] += 1
        self.beyond_bound += quoted.bound_s is not None and measured_s > quoted.bound_s
        return side

    # -- state

    def state(self, now: float, device: Device, *, whole: bool = False, short: bool = False) -> QuoteState | None:
        """Return the state from which quotes are computed; None while step times are unknown. `whole`: include the
        calibration, so that another process can compute quotes. `short`: leave out sizes of long work, which do not
        matter for a short request."""
        pacer, config, backlog = self._pacer, self._config, self.backlog
        model = pacer.model.coefficients
        if model is None:
            return None
        sizes, gap = pacer.sizes, pacer.gap
        gap_s = gap.least_s
        opens_at = gap.opens_at(now + device.left_s)
        rate, share = backlog.short_rate(now)
        threshold = pacer.threshold_tokens
        kinds = ((cls, kind) for cls in CLASSES for kind in (*range(KINDS), -1)) if whole else ()
        waiting = ((i, s.requests, max(0.0, s.seconds)) for i, s in enumerate(backlog.long) if s.requests)
        return QuoteState(
            model=model,
            threshold=threshold,
            whole_prompt=config.length_basis == "prompt",
            least_work=config.order == LEAST_WORK,
            share=self._share * LATE if self._deadlines else self._share,
            chunk=sizes.budget,
            short_batch=sizes.budget if sizes.layers else sizes.preempting_budget(threshold),
            layers=sizes.layers,
            gap_s=gap_s,
            gap_left_s=min(max(0.0, opens_at - now), 8.0 * gap_s) if math.isfinite(opens_at) else 0.0,
            runs=self._deadlines,
            left_s=max(0.0, device.left_s),
            under_way=device.under_way,
            shorts=backlog.short.requests,
            short_tokens=backlog.short.tokens,
            short_s=max(0.0, backlog.short.seconds),
            longs=tuple(islice(waiting, 1) if short else waiting),
            short_rate=rate,
            short_share=share,
            long_shares=() if short else backlog.long_rates(now),
            before_s=max(0.0, self._before_s or 0.0),
            longest=backlog.longest,
            longest_short_s=self._longest_short_s,
            factors=tuple((cls, kind, *self.calibration.factors(cls, kind)) for cls, kind in kinds),
        )
