"""Demand of each class (servers), measured since the work last changed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from laps_core.pools.config import AllocConfig
from laps_core.pools.outlook import Outlook
from laps_core.pools.pressure import InstanceSignals, Work
from laps_core.protocol import ByClass

MOST_PERIODS = 4
"""Longest time over which arriving work is averaged (control periods)."""
CHANGE_ERRORS = 5.0
"""Least difference of the mean work before and after a change (standard errors)."""
LEAST_SAMPLES = 2
"""Least number of samples after a change: a single sample may be one large request."""
FIRST = 10
"""Number of first samples from which the noise is learnt without clipping."""
MEMORY = 0.99
"""Factor by which the learnt noise decays per sample."""
EXACT = 0.02
"""Least relative error of the work in one sample."""
LONGEST_STEP_S = 60.0
"""Longest time of one step on a device (seconds)."""
CAUGHT_UP = 0.1
"""Most waiting work of a server that has caught up, as a share of its busy time since it last caught up (0..1)."""
HORIZON_S = 120.0
"""Time constant with which measured request times are forgotten (seconds per server)."""
PRIOR_S = 1.0
"""Initial work whose measured and predicted time are assumed to be equal (seconds)."""
MOST_RATIO = 8.0
"""Limit of the ratio between measured and predicted time, in both directions."""


class BusySplit:
    """Split of a device's busy time by class, from one sample to the next."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._seen = self._over = self._done = self._last = Work()

    def since(self, now: float, busy_share: float, reported: ByClass | None, outlook: Outlook) -> Work:
        """Return each class's share of the time since the last sample (0..1; the sum is at most 1, too).

        ``reported``: busy seconds of each class since the server's start, with ``now`` of the server's clock; if no
        time has passed, the last shares are returned again. None if unknown: then ``busy_share`` is split like this
        router's own work.
        """
        done, before = outlook.done, self._done
        self._done = done
        if reported is not None:
            return self._split_reported(now, Work(reported.short, reported.long))
        short, long = done.short - before.short, done.long - before.long
        if not short + long:
            short, long = outlook.waiting(now)
        part = short / (short + long) if short + long else 0.5
        return Work(busy_share * part, busy_share * (1.0 - part))

    def _split_reported(self, now: float, reported: Work) -> Work:
        at, seen = self._at, self._seen
        if at is not None and now == at:
            return self._last
        self._at, self._seen = now, reported
        if at is None or now < at or reported.short < seen.short or reported.long < seen.long:
            # First answer, or a restarted server.
            self._over = self._last = Work()
            return self._last
        # The server reports a step as a whole when the step ends, but a device cannot be busy for longer than the time
        # between two samples. The excess belongs to earlier samples and is counted in later ones.
        due = [min(t - s, LONGEST_STEP_S) + o for t, s, o in zip(reported, seen, self._over, strict=True)]
        total = sum(due)
        counted = min(1.0, (now - at) / total) if total > 0.0 else 0.0
        self._over = Work(*(min(d * (1.0 - counted), LONGEST_STEP_S) for d in due))
        self._last = Work(*(min(1.0, d * counted / (now - at)) for d in due))
        return self._last


class _Sample(NamedTuple):
    span_s: float
    arrived: Work


class _MeasuredTimes:
    """Device time that requests took, and the time that was predicted at their arrival, by class (seconds)."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, Work, Work]] = {}
        """Servers that have not caught up: name -> time, busy time and predicted arrived work (seconds)."""
        self._seconds, self._took, self._arrived = 0.0, [0.0, 0.0], [0.0, 0.0]

    def observe(self, span: float, known: Sequence[tuple[InstanceSignals, Work]]) -> None:
        """Take in a sample of all servers whose arrivals are known."""
        before, self._open = self._open, {}
        for s, arrived in known:
            seconds, took_s, arrived_s = before.get(s.name, (0.0, Work(), Work()))
            seconds += span
            took_s = Work(*(t + span * b for t, b in zip(took_s, s.busy, strict=True)))
            arrived_s = Work(*(t + span * c for t, c in zip(arrived_s, arrived, strict=True)))
            if sum(s.waiting) > CAUGHT_UP * sum(took_s):
                # The server has not done all of the arrived work yet.
                self._open[s.name] = seconds, took_s, arrived_s
                continue
            keep = math.exp(-seconds / (HORIZON_S * len(known)))
            self._seconds = keep * self._seconds + seconds
            for c in (0, 1):
                self._took[c] = keep * self._took[c] + took_s[c]
                self._arrived[c] = keep * self._arrived[c] + arrived_s[c]

    def corrected(self, c: int, arrived: float, servers: int) -> float:
        """Return the arriving work of class ``c`` (servers): the predicted work ``arrived`` corrected by measured
        times, plus the work of unobserved senders at ``servers`` servers."""
        ratio = (PRIOR_S + self._took[c]) / (PRIOR_S + self._arrived[c])
        ratio = min(max(ratio, 1.0 / MOST_RATIO), MOST_RATIO)
        rest = max(0.0, self._took[c] - ratio * self._arrived[c]) / self._seconds if self._seconds else 0.0
        return ratio * arrived + rest * servers


class Demand:
    """Arriving work in servers, predicted at arrival and corrected by measured times.

    The work is averaged since its last change: a point before and after which the mean of a class differs by more than
    chance. Requests arrive at random, so the variance of a class is assumed to be proportional to its work, with a
    factor that is learnt from the differences between samples.
    """

    def __init__(self, config: AllocConfig) -> None:
        self._config = config
        self._at: float | None = None
        self._measured = _MeasuredTimes()
        self._seen: deque[_Sample] = deque()
        self._noise = [_Noise(), _Noise()]

    def observe(self, now: float, healthy: Sequence[InstanceSignals]) -> Work:
        """Take in a sample of all healthy instances; return the work that arrived since the last sample (servers). An
        instance with unknown arrivals counts with its busy time."""
        span = 0.0 if self._at is None else now - self._at
        if self._at is None or span > 0.0:
            self._at = now
        if span <= 0.0:
            return Work()
        known = [(s, s.arrived) for s in healthy if s.arrived is not None]
        self._measured.observe(span, known)
        of_known = (self._measured.corrected(c, sum(arrived[c] for _, arrived in known), len(known)) for c in (0, 1))
        arrived = Work(*(w + sum(s.busy[c] for s in healthy if s.arrived is None) for c, w in enumerate(of_known)))
        if self._seen:
            for c, noise in enumerate(self._noise):
                noise.observe(self._seen[-1].arrived[c], arrived[c])
        self._seen.append(_Sample(span, arrived))
        rest_s, most_s = self.span_s, MOST_PERIODS * self._config.interval_s * 0.99
        while (rest_s := rest_s - self._seen[0].span_s) > most_s:
            self._seen.popleft()
        return arrived

    def drop_before_change(self) -> bool:
        """Drop the samples before a change of the work; return True if a change was found."""
        changed = max(noise.change([s.arrived[c] for s in self._seen]) for c, noise in enumerate(self._noise))
        for _ in range(changed):
            self._seen.popleft()
        return changed > 0

    @property
    def span_s(self) -> float:
        """Return the time over which the work is averaged (seconds)."""
        return sum(s.span_s for s in self._seen)

    def servers(self) -> Work:
        """Return the servers that each class needs."""
        span = self.span_s
        return Work(*(sum(s.span_s * s.arrived[c] for s in self._seen) / span if span else 0.0 for c in (0, 1)))

    def error(self) -> Work:
        """Return the standard error of ``servers``."""
        means, n = self.servers(), max(1, len(self._seen))
        return Work(*(math.sqrt(noise.variance(m) / n) for noise, m in zip(self._noise, means, strict=True)))


class _Noise:
    """Variance of a class's work from one sample to the next."""

    def __init__(self) -> None:
        self._seen, self._squares, self._work = 0, 0.0, 0.0

    def observe(self, before: float, now: float) -> None:
        """Learn from two consecutive samples."""
        square, level = (now - before) ** 2 / 2, (before + now) / 2
        if self._seen >= FIRST:
            # Clip a change of the work: it is not noise, unless changes are frequent.
            square = min(square, CHANGE_ERRORS * CHANGE_ERRORS * self.variance(level))
        self._seen += 1
        self._squares, self._work = MEMORY * self._squares + square, MEMORY * self._work + level

    def variance(self, level: float) -> float:
        """Return the variance of one sample of ``level`` work."""
        ratio = self._squares / self._work if self._work > 0.0 else 0.0
        return max(ratio * level, (EXACT * level) ** 2)

    def change(self, values: Sequence[float]) -> int:
        """Return the number of ``values`` before a change; 0 if there is no change."""
        n, total = len(values), sum(values)
        if not n:
            return 0
        most, at = CHANGE_ERRORS * CHANGE_ERRORS * self.variance(total / n), 0
        for k, before in enumerate(accumulate(values[: n - LEAST_SAMPLES]), 1):
            # Squared difference of both means, divided by 1 / k + 1 / (n - k).
            squared = (before * n - total * k) ** 2 / (k * (n - k) * n)
            if squared > most:
                most, at = squared, k
        return at
