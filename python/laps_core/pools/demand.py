"""How many servers' worth of work there is of each class, from what was measured since it last changed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from laps_core.pools.outlook import Outlook
from laps_core.pools.pressure import InstanceSignals, PressureConfig, Work, bounded
from laps_core.protocol import ByClass

MOST_PERIODS = 4
"""What comes is averaged over at most so many control periods."""
SURE = 5.0
"""The work has changed where what came before and what came after are so many standard errors apart."""
LEAST = 2
"""Samples that make a change: one alone may be a large request."""
FIRST = 10
"""Samples from which the noise is learnt, whatever they are."""
MEMORY = 0.99
"""How much of what was learnt of the noise counts beside one more sample (ratio)."""
EXACT = 0.02
"""No work is known better than to this share of itself from one sample."""


class Spent:
    """Which part of the device's time went to which class, from one sample to the next."""

    def __init__(self) -> None:
        self._at = 0.0
        self._seen = self._done = Work()

    def since(self, now: float, busy_share: float, told: ByClass | None, outlook: Outlook) -> Work:
        """Shares of the time since the last sample (0..1 each). ``told``: seconds of each class since the server's
        start; None: it does not tell them apart, and its ``busy_share`` counts as this router's own work is made up."""
        span, self._at = now - self._at, now
        done, before = outlook.done, self._done
        self._done = done
        if told is not None:
            seen, last = Work(told.short, told.long), self._seen
            self._seen = seen
            if span <= 0.0 or min(seen.short - last.short, seen.long - last.long) < 0.0:
                # It was started again.
                return Work()
            return Work((seen.short - last.short) / span, (seen.long - last.long) / span)
        short, long = done.short - before.short, done.long - before.long
        if not short + long:
            short, long = outlook.waiting(now)
        part = short / (short + long) if short + long else 0.5
        return Work(busy_share * part, busy_share * (1.0 - part))


class _Sample(NamedTuple):
    span_s: float
    came: Work


class Demand:
    """What comes, in servers: what is worked on, and what more waits than before.

    Averaged since it last changed, which is where the work of a class before and after differs by more than chance
    makes it. Requests come by chance, so the variance of a class is taken to be in proportion to its work, as it has
    been from sample to sample.
    """

    def __init__(self, config: PressureConfig) -> None:
        self._config = config
        self._at: float | None = None
        self._waits = Work()
        self._seen: deque[_Sample] = deque()
        self._noise = [_Noise(), _Noise()]

    def observe(self, now: float, healthy: Sequence[InstanceSignals]) -> Work:
        """Take in a sample of all healthy instances; the work that came since the last one (servers). An instance with
        an endless backlog counts no more than as two others."""
        config = self._config
        waits = Work(*(sum(bounded([s.waiting[c] for s in healthy], config.ratio, config.period_s)) for c in (0, 1)))
        span, before = 0.0 if self._at is None else now - self._at, self._waits
        if self._at is None or span > 0.0:
            self._at, self._waits = now, waits
        if span <= 0.0:
            return Work()
        came = Work(*(sum(s.busy[c] for s in healthy) + (waits[c] - before[c]) / span for c in (0, 1)))
        if self._seen:
            for c, noise in enumerate(self._noise):
                noise.observe(self._seen[-1].came[c], came[c])
        self._seen.append(_Sample(span, came))
        while self.span_s - self._seen[0].span_s > MOST_PERIODS * config.period_s * 0.99:
            self._seen.popleft()
        return came

    def forget(self) -> bool:
        """Leave out what lies before a change; whether there was one."""
        changed = max(noise.change([s.came[c] for s in self._seen]) for c, noise in enumerate(self._noise))
        for _ in range(changed):
            self._seen.popleft()
        return changed > 0

    @property
    def span_s(self) -> float:
        """Over how long the work is averaged (seconds)."""
        return sum(s.span_s for s in self._seen)

    def servers(self) -> Work:
        """Of each class, how many servers it needs."""
        span = self.span_s
        return Work(*(max(0.0, sum(s.span_s * s.came[c] for s in self._seen) / span) if span else 0.0 for c in (0, 1)))

    def error(self) -> Work:
        """Standard error of ``servers``."""
        means, n = self.servers(), max(1, len(self._seen))
        return Work(*(math.sqrt(noise.variance(m) / n) for noise, m in zip(self._noise, means, strict=True)))


class _Noise:
    """How much the work of a class differs from one sample to the next."""

    def __init__(self) -> None:
        self._seen, self._squares, self._work = 0, 0.0, 0.0

    def observe(self, before: float, now: float) -> None:
        """Two samples that follow one another."""
        square, level = (now - before) ** 2 / 2, max(0.0, (before + now) / 2)
        if self._seen >= FIRST:
            # A change is no noise, unless there are many.
            square = min(square, SURE * SURE * self.variance(level))
        self._seen += 1
        self._squares, self._work = MEMORY * self._squares + square, MEMORY * self._work + level

    def variance(self, level: float) -> float:
        """Of one sample of so much work."""
        ratio = self._squares / self._work if self._work > 0.0 else 0.0
        return max(ratio * level, (EXACT * level) ** 2)

    def change(self, values: Sequence[float]) -> int:
        """How many of ``values`` lie before a change; 0 without one."""
        n, total = len(values), sum(values)
        if not n:
            return 0
        most, at = SURE * SURE * self.variance(max(0.0, total / n)), 0
        for k, before in enumerate(accumulate(values[: n - LEAST]), 1):
            squared = (before / k - (total - before) / (n - k)) ** 2 / (1 / k + 1 / (n - k))
            if squared > most:
                most, at = squared, k
        return at
