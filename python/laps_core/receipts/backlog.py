"""Sums of the work that waits on one server, and rates of the work that arrives, by class and size. Each change takes
constant time, independent of the number of waiting requests."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT, ClassName

REMEMBERED_S = 20.0
"""Time constant of the averages of rates (seconds)."""
_SMALLEST_S = 1e-4
_REBASED, _GONE = 30.0, 700.0
"""Exponent above which sums are rescaled, and largest exponent of their decay, which leaves practically nothing."""
SIZES = 48
"""Size classes of long work, by half powers of two."""


def size_of(seconds: float) -> int:
    """Return the size class of work (0 to SIZES - 1). Each class ends at sqrt(2) times the end of the class before."""
    if seconds <= _SMALLEST_S:
        return 0
    return min(SIZES - 1, 1 + int(2.0 * math.log2(seconds / _SMALLEST_S)))


def work_s(model: Coefficients, new: int, cached: int, chunk: int) -> float:
    """Return the predicted device time of a request in batches of its own class (seconds), without the fixed time of
    its first step. `chunk`: most new tokens of a batch."""
    more = -(-new // chunk) - 1
    read = model.gamma_r * chunk * more * (more + 1) / 2 + model.gamma_r * cached * more
    return model.work_s(new, cached) + more * (model.fixed + model.per_request) + read


class _Rates:
    """Amounts that arrive per second, averaged over about REMEMBERED_S."""

    def __init__(self, kinds: int, now: float) -> None:
        self.sums = [0.0] * kinds
        """Sums of each kind; their decay since ``_base_s`` is applied when they are read."""
        self._begun_s = self._base_s = now

    def add(self, now: float, kind: int, amount: float) -> None:
        grown = (now - self._base_s) / REMEMBERED_S
        if grown > _REBASED:
            faded = math.exp(-grown)
            self.sums = [x * faded for x in self.sums]
            self._base_s, grown = now, 0.0
        self.sums[kind] += amount * math.exp(grown)

    def factor(self, now: float) -> float:
        """Return the factor that converts ``sums`` to rates at `now`."""
        # Soon after the start, a sum has not had the time to reach its full height.
        grown = 1.0 - math.exp(-max(now - self._begun_s, 1.0) / REMEMBERED_S)
        return math.exp(-min((now - self._base_s) / REMEMBERED_S, _GONE)) / (REMEMBERED_S * grown)


class _Entry(NamedTuple):
    cls: ClassName
    size: int
    seconds: float
    tokens: int


class Sums(NamedTuple):
    """Waiting requests of one kind."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float, requests: int = 1) -> Sums:
        """Return the sums with this added; exactly 0 if no request is left, so that no rounding error stays."""
        count = self.requests + requests
        return Sums(count, self.tokens + tokens, self.seconds + seconds) if count > 0 else Sums()


class Backlog:
    """Requests that wait, wholly or in part. The caller chooses the keys."""

    def __init__(self, now: float) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self.short = Sums()
        self.long = [Sums()] * SIZES
        self.longest = 0
        """Tokens of the longest prompt so far."""
        self._rates = _Rates(SIZES + 2, now)

    def __len__(self) -> int:
        return len(self._entries)

    def count_arrival(self, now: float, cls: ClassName, seconds: float, tokens: int) -> None:
        """Count an arrived request: predicted `seconds` of work, and `tokens` of the whole prompt."""
        self.longest = max(self.longest, tokens)
        if cls == SHORT:
            self._rates.add(now, SIZES, 1.0)
            self._rates.add(now, SIZES + 1, seconds)
        else:
            self._rates.add(now, size_of(seconds), seconds)

    def set_waiting(self, key: Hashable, cls: ClassName, seconds: float, tokens: int) -> None:
        """Set the part of a request that waits (seconds, new tokens)."""
        self.remove(key)
        entry = self._entries[key] = _Entry(cls, size_of(seconds), seconds, tokens)
        self._add(entry, 1)

    def remove(self, key: Hashable) -> None:
        """Remove a request, of which no part waits any more."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._add(entry, -1)

    def remove_except(self, keys: set[Hashable]) -> None:
        for key in self._entries.keys() - keys:
            self.remove(key)

    def short_rate(self, now: float) -> tuple[float, float]:
        """Return short requests per second, and seconds of their work per second."""
        factor, sums = self._rates.factor(now), self._rates.sums
        return sums[SIZES] * factor, sums[SIZES + 1] * factor

    def long_rates(self, now: float) -> tuple[tuple[int, float], ...]:
        """Return (size class, seconds of work that arrive per second) of long work."""
        factor = self._rates.factor(now)
        return tuple((size, x * factor) for size, x in enumerate(self._rates.sums[:SIZES]) if x)

    def _add(self, entry: _Entry, sign: int) -> None:
        if entry.cls == LONG:
            self.long[entry.size] = self.long[entry.size].add(sign * entry.tokens, sign * entry.seconds, sign)
        else:
            self.short = self.short.add(sign * entry.tokens, sign * entry.seconds, sign)
