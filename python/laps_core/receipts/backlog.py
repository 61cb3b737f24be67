"""Sums of the work that waits on one server, by class and size, and of the work that comes. Each change costs the
same, however much waits."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT, ClassName

REMEMBERED_S = 20.0
"""Rates are those of about so long (seconds)."""
_SMALLEST_S = 1e-4
_REBASED, _GONE = 30.0, 700.0
"""Exponents at which sums are written anew, and beyond which nothing is left of them."""
SIZES = 48
"""Sizes of long work that are told apart: half powers of two."""


def size_of(seconds: float) -> int:
    """Size class of work: each holds up to sqrt(2) times as much as the one before (0 to SIZES - 1)."""
    if seconds <= _SMALLEST_S:
        return 0
    return min(SIZES - 1, 1 + int(2.0 * math.log2(seconds / _SMALLEST_S)))


def work_s(model: Coefficients, new: int, cached: int, chunk: int) -> float:
    """Device time that a request needs in batches of its own class (seconds), without the fixed time of its first step.

    `chunk`: new tokens of a batch, at most.
    """
    more = -(-new // chunk) - 1
    read = model.gamma_r * chunk * more * (more + 1) / 2 + model.gamma_r * cached * more
    return model.work_s(new, cached) + more * (model.fixed + model.per_request) + read


class _Rates:
    """Amounts per second that come, of the last REMEMBERED_S or so."""

    def __init__(self, kinds: int, now: float) -> None:
        self._sums = [0.0] * kinds
        """Sums that count as faded since ``_base_s``."""
        self._begun_s = self._base_s = now

    def add(self, now: float, kind: int, amount: float) -> None:
        """So much has come."""
        grown = (now - self._base_s) / REMEMBERED_S
        if grown > _REBASED:
            faded = math.exp(-grown)
            self._sums = [x * faded for x in self._sums]
            self._base_s, grown = now, 0.0
        self._sums[kind] += amount * math.exp(grown)

    def factor(self, now: float) -> float:
        """Return the factor from ``sums`` to rates at `now`."""
        # A young sum has not had the time to reach its full height.
        grown = 1.0 - math.exp(-max(now - self._begun_s, 1.0) / REMEMBERED_S)
        return math.exp(-min((now - self._base_s) / REMEMBERED_S, _GONE)) / (REMEMBERED_S * grown)

    @property
    def sums(self) -> list[float]:
        """Sums of each kind."""
        return self._sums


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
        """With this added; exactly nothing where no request is left."""
        count = self.requests + requests
        return Sums(count, self.tokens + tokens, self.seconds + seconds) if count > 0 else Sums()


class Backlog:
    """Requests that wait, or of which a part does. Keys are the caller's."""

    def __init__(self, now: float) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self.short = Sums()
        self.long = [Sums()] * SIZES
        self.longest = 0
        """Tokens of the longest prompt so far."""
        self._rates = _Rates(SIZES + 2, now)

    def __len__(self) -> int:
        return len(self._entries)

    def came(self, now: float, cls: ClassName, seconds: float, tokens: int) -> None:
        """Count the work of a request that has come (seconds), and its whole prompt (tokens)."""
        self.longest = max(self.longest, tokens)
        if cls == SHORT:
            self._rates.add(now, SIZES, 1.0)
            self._rates.add(now, SIZES + 1, seconds)
        else:
            self._rates.add(now, size_of(seconds), seconds)

    def put(self, key: Hashable, cls: ClassName, seconds: float, tokens: int) -> None:
        """So much of this request waits (seconds, new tokens); it replaces what did before."""
        self.take(key)
        entry = self._entries[key] = _Entry(cls, size_of(seconds), seconds, tokens)
        self._add(entry, 1)

    def take(self, key: Hashable) -> None:
        """Nothing of this request waits any more."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._add(entry, -1)

    def keep(self, keys: set[Hashable]) -> None:
        """Take all but these."""
        for key in self._entries.keys() - keys:
            self.take(key)

    def short_rate(self, now: float) -> tuple[float, float]:
        """Short requests per second, and seconds of their work per second."""
        factor, sums = self._rates.factor(now), self._rates.sums
        return sums[SIZES] * factor, sums[SIZES + 1] * factor

    def long_rates(self, now: float) -> tuple[tuple[int, float], ...]:
        """Size of long work, and seconds of it that come per second."""
        factor = self._rates.factor(now)
        return tuple((size, x * factor) for size, x in enumerate(self._rates.sums[:SIZES]) if x)

    def _add(self, entry: _Entry, sign: int) -> None:
        if entry.cls == LONG:
            self.long[entry.size] = self.long[entry.size].add(sign * entry.tokens, sign * entry.seconds, sign)
        else:
            self.short = self.short.add(sign * entry.tokens, sign * entry.seconds, sign)
