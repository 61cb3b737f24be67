"""How many servers' worth of work there is of each class, from what was measured over the last control period."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from laps_core.pools.outlook import Outlook
from laps_core.pools.pressure import InstanceSignals, PressureConfig, Work, bounded
from laps_core.protocol import ByClass

CATCH_UP = 10.0
"""What waits is to be worked off within so many control periods, beside what comes."""


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


class Demand:
    """What comes, in servers: what is worked on, what more waits than a period ago, and some of what waits."""

    def __init__(self, config: PressureConfig) -> None:
        self._config = config
        self._seen: deque[tuple[float, Work, Work]] = deque()
        """When, the time spent on each class until then, and what waited then (seconds, of all servers)."""

    def observe(self, now: float, healthy: Sequence[InstanceSignals]) -> None:
        """Take in a sample of all healthy instances. One with an endless backlog counts no more than as two others."""
        seen, config = self._seen, self._config
        at, spent, _ = seen[-1] if seen else (now, Work(), Work())
        span = max(0.0, now - at)
        spent = Work(
            spent.short + span * sum(s.busy.short for s in healthy),
            spent.long + span * sum(s.busy.long for s in healthy),
        )
        short = bounded([s.waiting.short for s in healthy], config.ratio, config.period_s)
        long = bounded([s.waiting.long for s in healthy], config.ratio, config.period_s)
        seen.append((now, spent, Work(sum(short), sum(long))))
        while len(seen) > 2 and now - seen[1][0] >= config.period_s * 0.99:
            seen.popleft()

    def servers(self) -> Work:
        """Of each class, how many servers it needs."""
        if len(self._seen) < 2:
            return Work()
        (began, *before), (now, *after) = self._seen[0], self._seen[-1]
        span, catch_up_s = max(now - began, 1e-9), CATCH_UP * self._config.period_s
        needs = (
            (done - done_before + waits - waited) / span + waits / catch_up_s
            for done_before, waited, done, waits in zip(*before, *after, strict=True)
        )
        return Work(*(max(0.0, n) for n in needs))
