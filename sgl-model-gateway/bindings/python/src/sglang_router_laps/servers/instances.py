"""The servers behind the router, and what each has in flight."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from laps_core.pools.pressure import Pool
from laps_core.slo import overshoot
from yarl import URL

from ..prompts.prefixes import PrefixIndex
from .breaker import Breaker

Role = Literal["prefill", "decode"]
Clock = Callable[[], float]

SPAN_S = 5.0
"""Over about how long the router's own view of an instance is averaged (seconds)."""
REST_S = 1.0
"""How long an instance that could not be reached for a reason of this machine's is passed over (seconds)."""
PREFIX_TOKENS = 1 << 20
"""Bound of the prefix index of one server: about what the KV cache of a large one holds (tokens)."""
TOGETHER_S = 5.0
"""Requests that an instance loses within this time were lost together (seconds)."""


class Instance:
    """One prefill or decode server: address, health, and work in flight as this router knows it."""

    def __init__(self, url: str, role: Role, clock: Clock = time.monotonic) -> None:
        self.url = url.rstrip("/")
        self.role = role
        self.healthy = True
        self.failures = 0
        """Requests that failed in a row: connections lost, time-outs."""
        self.outstanding_tokens = 0
        """New tokens in flight."""
        self.served = 0
        """Requests handed to it so far."""
        self.served_tokens = 0
        self.lost = 0
        """Requests that ended because the connection did."""
        self.breaker = Breaker(clock=clock)
        self.heard_at = clock()
        """When it last sent anything at all."""
        self.suspected = asyncio.Event()
        """It is to be probed at once."""
        self.leases: set[Lease] = set()
        self._rests_until = self._lost_at = -math.inf
        self.clock = clock
        self.busy_since = 0.0
        """Since when it has had something in flight, while it has."""
        self.busy_s = 0.0
        """Time it has had something in flight, up to then (seconds)."""
        self._urls: dict[str, URL] = {}

    @property
    def outstanding(self) -> int:
        """Requests in flight."""
        return len(self.leases)

    @property
    def usable(self) -> bool:
        """A new request may go there."""
        return self.healthy and self.breaker.admits() and self.clock() >= self._rests_until

    def heard(self) -> None:
        """It has sent something."""
        self.heard_at = self.clock()

    def rest(self) -> None:
        """Pass it over for a moment, without any blame."""
        self._rests_until = self.clock() + REST_S

    def note_lost(self) -> bool:
        """A request that was there is lost; whether others were with it, so that it need not be what killed it."""
        now, before = self.clock(), self._lost_at
        self._lost_at = now
        return self.outstanding > 0 or now - before < TOGETHER_S

    def cut(self) -> None:
        """End all that waits for its first token there; what awaits such a leg sees it cancelled."""
        for lease in list(self.leases):
            if lease.leg is not None:
                lease.leg.cancel()

    def address(self, path: str) -> URL:
        """The URL of one of its routes, parsed once."""
        found = self._urls.get(path)
        if found is None:
            found = self._urls[path] = URL(f"{self.url}/{path}")
        return found

    def busy_seconds(self) -> float:
        """Time it has had anything in flight since the start (seconds)."""
        return self.busy_s + (self.clock() - self.busy_since if self.leases else 0.0)

    def lease(self, tokens: int) -> Lease:
        """Account for a request of ``tokens`` new tokens until the lease ends."""
        return Lease(self, tokens)


class PrefillInstance(Instance):
    """A prefill server: a member of one pool, with an index of the prefixes it has seen."""

    def __init__(self, url: str, bootstrap_port: int | None, pool: Pool, clock: Clock = time.monotonic) -> None:
        super().__init__(url, "prefill", clock)
        self.bootstrap_host = URL(self.url).host_subcomponent or ""
        self.bootstrap_port = bootstrap_port
        self.pool: Pool = pool
        self.prefixes = PrefixIndex(PREFIX_TOKENS)
        self.parks = False
        """It is known to run LAPS: a long prefill there is parked while short ones run."""
        self._deviation = 0.0
        self._deviation_at = clock()

    def note_ttft(self, seconds: float, slo_s: float) -> None:
        """Take in one first token and its deadline (seconds)."""
        keep = 0.8 * self._fading()
        self._deviation = self._deviation * keep + overshoot(seconds, slo_s) * (1 - keep)
        self._deviation_at = self.clock()

    def _fading(self) -> float:
        return 2.0 ** (-(self.clock() - self._deviation_at) / SPAN_S)

    @property
    def deviation(self) -> float:
        """Mean relative overshoot of the deadlines this router saw (ratio): without new ones it halves every few
        seconds."""
        return self._deviation * self._fading()


@dataclass(eq=False, slots=True)
class Lease:
    """Work handed to one instance. It ends once: by ``end``, or at the latest with its ``with`` block."""

    instance: Instance
    tokens: int
    leg: asyncio.Task[Any] | None = None
    """What runs until the first token has come."""
    _trial: bool = False

    def __enter__(self) -> Lease:
        i = self.instance
        self._trial = i.breaker.enter()
        if not i.leases:
            i.busy_since = i.clock()
        i.leases.add(self)
        i.outstanding_tokens += self.tokens
        i.served += 1
        i.served_tokens += self.tokens
        return self

    def end(self) -> None:
        """Take the work off the instance's account; later calls do nothing."""
        i = self.instance
        if self not in i.leases:
            return
        i.leases.discard(self)
        i.outstanding_tokens -= self.tokens
        if not i.leases:
            i.busy_s += i.clock() - i.busy_since
        if self._trial:
            i.breaker.leave()

    def __exit__(self, *_: object) -> None:
        self.end()


T = TypeVar("T", bound=Instance)


def open_to(instances: Sequence[T], avoid: Collection[Instance]) -> list[T]:
    """Those that a request may go to; ones in ``avoid`` only without any other, and open breakers count only
    while another instance is left: a server that fails is better than none."""
    healthy = [i for i in instances if i.healthy]
    return [i for i in healthy if i.usable and i not in avoid] or [i for i in healthy if i not in avoid] or healthy
