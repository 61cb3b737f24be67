"""Quotes of one scheduler: kept sums of what waits, a quote for each request that comes, and how it turned out."""

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
"""Weight of the newest in the mean time before the queue (0..1)."""
KINDS = 6


@dataclass(slots=True)
class Quoted:
    """A request's quote. Times are seconds of the caller's clock, or from its arrival on."""

    at_s: float
    """When it was quoted."""
    waited_s: float
    """Time that it had waited then."""
    cls: ClassName
    seconds: float
    """Predicted from then on, before calibration."""
    kind: int
    low_s: float
    median_s: float
    high_s: float
    bound_s: float | None
    """From its arrival."""


@dataclass(slots=True)
class Device:
    """The device, as its scheduler knows it (seconds)."""

    left_s: float = 0.0
    """Until it can take another batch."""
    under_way: tuple[float, ...] = ()
    """Time that each long batch on it still needs."""


class Quoter:
    """Keeps the sums, quotes and calibrates. A call costs the same, however much waits."""

    def __init__(self, config: LapsConfig, pacer: Pacer, now: float, *, guaranteed: bool = True) -> None:
        """`guaranteed`: the guard decides alone: no data-parallel ranks that plan together, no priorities, no decode
        steps."""
        self._config, self._pacer = config, pacer
        self._share = config.guard if guaranteed and config.order == LEAST_WORK and config.preset is None else 0.0
        self._deadlines = config.ttft_slo_ms is not None
        self.backlog = Backlog(now)
        self.calibration = Calibration()
        self.counts: dict[ClassName, dict[Side, int]] = {c: {"inside": 0, "below": 0, "above": 0} for c in CLASSES}
        """Outcomes so far."""
        self.broken = 0
        """Outcomes that were longer than their bound."""
        self._before_s: float | None = None
        self._longest_short_s = 0.0

    # -- events

    def came(
        self, now: float, key: Hashable, new: int, cached: int, cls: ClassName, device: Device, *,
        waited_s: float = 0.0, due: bool = False,
    ) -> Quoted | None:  # fmt: skip
        """Quote a request that enters the queue, and count it from now on; None while nothing is known of step times.
        `waited_s`: since it came. `due`: it has a deadline."""
        # One that is too late takes from the guard of all others.
        self._deadlines = self._deadlines or due
        state = self.state(now, device, short=cls == SHORT)
        if state is None:
            return None
        smooth = 1.0 if self._before_s is None else _SMOOTH
        self._before_s = (self._before_s or 0.0) + smooth * (waited_s - (self._before_s or 0.0))
        found = predict(state, new, cached, cls)
        self._put(key, cls, new, cached)
        self.backlog.came(now, cls, work_s(state.model, new, cached, state.chunk), new + cached)
        factors = self.calibration.factors(cls, found.kind)
        bound = bound_s(state, new, cached) if cls == LONG else None
        top = math.inf if bound is None else bound
        low, median, high = (waited_s + min(f * found.seconds, top) for f in factors)
        whole = None if bound is None else waited_s + bound
        return Quoted(now, waited_s, cls, found.seconds, found.kind, low, median, high, whole)

    def waits(self, key: Hashable, cls: ClassName, new: int, cached: int) -> None:
        """So much of a request waits."""
        self._put(key, cls, new, cached)

    def launched(self, key: Hashable, left: int, cached: int) -> None:
        """A part of a request goes to the device; `left` new tokens of it wait on, behind `cached`."""
        if left > 0:
            self._put(key, LONG, left, cached)
        else:
            self.backlog.take(key)

    def ran(self, cls: ClassName, seconds: float) -> None:
        """A batch had the device so long."""
        if cls == SHORT:
            self._longest_short_s = max(self._longest_short_s, seconds)

    def answered(self, now: float, quoted: Quoted) -> Side:
        """A quoted request has its first token: where it lies against its interval."""
        took_s = now - quoted.at_s
        measured_s = quoted.waited_s + took_s
        side = side_of(measured_s, quoted.low_s, quoted.high_s)
        self.calibration.observe(quoted.cls, quoted.kind, quoted.seconds, took_s, side)
        self.counts[quoted.cls][side] += 1
        self.broken += quoted.bound_s is not None and measured_s > quoted.bound_s
        return side

    # -- state

    def state(self, now: float, device: Device, *, whole: bool = False, short: bool = False) -> QuoteState | None:
        """Return the state that quotes are computed from; None while nothing is known of step times. `whole`: with
        the calibration, for somebody else to compute them. `short`: for a short request, to which the sizes of long
        work are all one."""
        pacer, config, backlog = self._pacer, self._config, self.backlog
        model = pacer.model.coefficients
        if model is None:
            return None
        sizes, gap = pacer.sizes, pacer.gap
        gap_s = gap.least_s
        opens_s = gap.opens_s(now + device.left_s)
        rate, share = backlog.short_rate(now)
        threshold = pacer.threshold_tokens
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
            gap_left_s=min(max(0.0, opens_s - now), 8.0 * gap_s) if math.isfinite(opens_s) else 0.0,
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
            factors=self._factors() if whole else (),
        )

    def _factors(self) -> tuple[tuple[ClassName, int, float, float, float], ...]:
        every = ((cls, kind) for cls in CLASSES for kind in (*range(KINDS), -1))
        return tuple((cls, kind, *self.calibration.factors(cls, kind)) for cls, kind in every)

    def _put(self, key: Hashable, cls: ClassName, new: int, cached: int) -> None:
        model = self._pacer.model.coefficients
        if model is not None:
            self.backlog.put(key, cls, work_s(model, new, cached, self._pacer.sizes.budget), new)
