"""What clients ask for, and when. Lengths are tokens, times seconds; the same seed gives the same requests."""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmark.rig import lengths
from benchmark.sim.request import Request

Sizes = Callable[[random.Random], int]
"""Draws the new tokens of one request."""
TURNAROUND_S = (0.2e-3, 3e-3)
"""How soon a client in a closed loop sends again: uniform (seconds)."""


class Workload(Protocol):
    """Requests that come by themselves, and requests that follow answers."""

    follows: bool
    """Whether ``answered`` ever names a next request."""

    def arrivals(self) -> Iterator[Request]:
        """In order of time. May be read once."""

    def answered(self, now: float, request: Request) -> Request | None:
        """The request that follows ``request``, answered at ``now``."""


# -- lengths


def uniform(low: int, high: int) -> Sizes:
    """Every length from ``low`` to ``high`` alike."""
    span = high - low + 1
    return lambda rng: low + int(rng.random() * span)


def fixed(tokens: int) -> Sizes:
    """Always ``tokens``."""
    return lambda rng: tokens


def log_uniform(low: int, high: int) -> Sizes:
    """Between ``low`` and ``high``, every factor alike."""
    base, span = math.log(low), math.log(high / low)
    return lambda rng: round(math.exp(base + span * rng.random()))


def drawn(pool: Sequence[int]) -> Sizes:
    """From a list of lengths."""
    n = len(pool)
    return lambda rng: pool[int(rng.random() * n)]


def lmsys(cap: int | None = None) -> Sizes:
    """LMSYS-Chat-1M prompt lengths (benchmark/traces), at most ``cap``."""
    pool = [max(1, n if cap is None else min(cap, n)) for n in lengths.read(lengths.LMSYS)]
    return drawn(pool)


def mix(short: Sizes, long: Sizes, long_share: float) -> Sizes:
    """``long`` with probability ``long_share`` (0..1), else ``short``."""

    def draw(rng: random.Random) -> int:
        return long(rng) if rng.random() < long_share else short(rng)

    return draw


# -- open loads


@dataclass
class Open:
    """``n`` requests at ``rate`` per second, whatever comes back.

    ``burst`` 1: a Poisson process. More: bursts of that many on average (geometric), a Poisson process each, whose
    members come ``spacing_s`` apart on average.
    """

    sizes: Sizes
    rate: float
    n: int
    seed: int = 0
    burst: float = 1.0
    spacing_s: float = 1e-3
    slo_s: float | None = None
    follows: bool = False

    def arrivals(self) -> Iterator[Request]:
        """See Workload."""
        rng = random.Random(self.seed)
        times = self._poisson(rng) if self.burst <= 1.0 else iter(self._bursts(rng))
        sizes, slo_s = self.sizes, self.slo_s
        for i, at in enumerate(times):
            yield Request(i, at, sizes(rng), slo_s=slo_s)

    def answered(self, now: float, request: Request) -> Request | None:
        """See Workload."""
        return None

    def _poisson(self, rng: random.Random) -> Iterator[float]:
        at, gap = 0.0, random.Random(rng.random())
        for _ in range(self.n):
            at += gap.expovariate(self.rate)
            yield at

    def _bursts(self, rng: random.Random) -> list[float]:
        times: list[float] = []
        at = 0.0
        go_on = 1.0 - 1.0 / self.burst
        while len(times) < self.n:
            at += rng.expovariate(self.rate / self.burst)
            member = at
            times.append(member)
            while rng.random() < go_on:
                member += rng.expovariate(1.0 / self.spacing_s)
                times.append(member)
        return sorted(times)[: self.n]


class Row(NamedTuple):
    """One request of a trace."""

    at_s: float
    new: int
    cached: int


def read_trace(path: Path) -> list[Row]:
    """A gzip CSV with ``arrival_ms,new_tokens,cached_tokens``. Raises OSError, KeyError or ValueError."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as f:
        rows = [
            Row(float(r["arrival_ms"]) / 1e3, max(1, int(r["new_tokens"])), int(r.get("cached_tokens") or 0))
            for r in csv.DictReader(f)
        ]
    return sorted(rows)


@dataclass
class Trace:
    """Given arrivals. ``stretch``: times are multiplied by it; ``repeat``: how often the trace is played in a row.

    Cached tokens are taken to be cached on every server, as in a shared cache tier.
    """

    rows: Sequence[Row]
    stretch: float = 1.0
    repeat: int = 1
    slo_s: float | None = None
    follows: bool = False

    def arrivals(self) -> Iterator[Request]:
        """See Workload."""
        span = self.rows[-1].at_s - self.rows[0].at_s
        number = 0
        for lap in range(self.repeat):
            shift = lap * span * (1 + 1 / len(self.rows))
            for row in self.rows:
                yield Request(number, (row.at_s + shift) * self.stretch, row.new, row.cached, slo_s=self.slo_s)
                number += 1

    def answered(self, now: float, request: Request) -> Request | None:
        """See Workload."""
        return None


# -- closed loads


@dataclass
class Closed:
    """``clients`` that each send the next request a turnaround after the last answer, ``n`` requests in all."""

    sizes: Sizes
    clients: int
    n: int
    seed: int = 0
    turnaround_s: tuple[float, float] = TURNAROUND_S
    slo_s: float | None = None
    follows: bool = True
    _rngs: list[random.Random] = field(init=False, default_factory=list)
    _sent: int = field(init=False, default=0)

    def arrivals(self) -> Iterator[Request]:
        """See Workload."""
        # A stream of lengths per client: what a client asks does not depend on who was answered first.
        self._rngs = [random.Random(f"{self.seed}/{i}") for i in range(self.clients)]
        first = [self._next(0.0, i) for i in range(min(self.clients, self.n))]
        return iter(sorted(first, key=lambda r: r.at))

    def answered(self, now: float, request: Request) -> Request | None:
        """See Workload."""
        return self._next(now, request.client) if self._sent < self.n else None

    def _next(self, now: float, client: int) -> Request:
        rng = self._rngs[client]
        low, high = self.turnaround_s
        self._sent += 1
        at = now + low + (high - low) * rng.random()
        return Request(self._sent, at, self.sizes(rng), client=client, slo_s=self.slo_s)


@dataclass
class Populations:
    """Closed loops of several kinds of clients: (what they ask, how many) each. Never ends by itself."""

    kinds: Sequence[tuple[Sizes, int]]
    seed: int = 0
    turnaround_s: tuple[float, float] = TURNAROUND_S
    follows: bool = True
    _clients: list[tuple[Sizes, random.Random]] = field(init=False, default_factory=list)
    _sent: int = field(init=False, default=0)

    def arrivals(self) -> Iterator[Request]:
        """See Workload."""
        every = [sizes for sizes, n in self.kinds for _ in range(n)]
        self._clients = [(sizes, random.Random(f"{self.seed}/{i}")) for i, sizes in enumerate(every)]
        return iter(sorted((self._next(0.0, i) for i in range(len(every))), key=lambda r: r.at))

    def answered(self, now: float, request: Request) -> Request | None:
        """See Workload."""
        return self._next(now, request.client)

    def _next(self, now: float, client: int) -> Request:
        sizes, rng = self._clients[client]
        low, high = self.turnaround_s
        self._sent += 1
        return Request(self._sent, now + low + (high - low) * rng.random(), sizes(rng), client=client)


@dataclass
class Jobs:
    """Offline work: ``n`` requests, at most ``clients`` of them under way; the next is sent with each answer.

    What ``Closed`` is without a turnaround: a feeder that keeps a fixed number in flight.
    """

    sizes: Sizes
    clients: int
    n: int
    seed: int = 0
    slo_s: float | None = None
    follows: bool = True

    def arrivals(self) -> Iterator[Request]:
        """See Workload."""
        rng = random.Random(self.seed)
        self._work = iter([self.sizes(rng) for _ in range(self.n)])
        self._sent = 0
        return iter([r for r in (self._next(0.0) for _ in range(self.clients)) if r is not None])

    def answered(self, now: float, request: Request) -> Request | None:
        """See Workload."""
        return self._next(now)

    def _next(self, now: float) -> Request | None:
        tokens = next(self._work, None)
        if tokens is None:
            return None
        self._sent += 1
        return Request(self._sent, now, tokens, slo_s=self.slo_s)


@dataclass
class Sessions:
    """Conversations: ``users`` at a time, each a new one when its last is over.

    A turn adds ``turn`` new tokens and later the ``reply`` of the model to the history; the next turn comes ``think_s``
    (exponential, mean) after the answer. The history is cached where the conversation was served before.
    """

    first: Sizes
    turn: Sizes
    users: int
    n: int
    turns: float = 5.0
    """Mean turns of a conversation (geometric)."""
    reply: Sizes = field(default_factory=lambda: uniform(50, 400))
    think_s: float = 5.0
    seed: int = 0
    slo_s: float | None = None
    follows: bool = True
    _history: dict[int, int] = field(init=False, default_factory=dict)
    _session: dict[int, int] = field(init=False, default_factory=dict)
    _sent: int = field(init=False, default=0)
    _count: int = field(init=False, default=0)

    def arrivals(self) -> Iterator[Request]:
        """See Workload."""
        self._rngs = [random.Random(f"{self.seed}/{i}") for i in range(self.users)]
        first = [self._next(0.0, i) for i in range(min(self.users, self.n))]
        return iter(sorted(first, key=lambda r: r.at))

    def answered(self, now: float, request: Request) -> Request | None:
        """See Workload."""
        return self._next(now, request.client) if self._sent < self.n else None

    def _next(self, now: float, user: int) -> Request:
        rng = self._rngs[user]
        self._sent += 1
        at = now + rng.expovariate(1.0 / self.think_s)
        if user not in self._session or rng.random() < 1.0 / self.turns:
            self._count += 1
            self._session[user] = self._count
            new, history = self.first(rng), 0
        else:
            history = self._history[user] + self.reply(rng)
            new = self.turn(rng)
        self._history[user] = history + new
        return Request(self._sent, at, new, history, client=user, session=self._session[user], slo_s=self.slo_s)
