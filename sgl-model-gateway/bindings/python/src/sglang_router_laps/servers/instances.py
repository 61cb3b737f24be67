"""The servers behind the router, and what each has in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

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
        self.outstanding = 0
        """Requests in flight."""
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
        self.leases: set[Lease] = set()
        self._rests_until: float | None = None
        self._lost_at: float | None = None
        self._clock = clock
        self._busy_since = 0.0
        """Since when it has had something in flight, while it has."""
        self._busy_s = 0.0
        self._urls: dict[str, URL] = {}

    @property
    def usable(self) -> bool:
        """A new request may go there."""
        if not self.healthy or not self.breaker.admits():
            return False
        return self._rests_until is None or self._clock() >= self._rests_until

    def heard(self) -> None:
        """It has sent something."""
        self.heard_at = self._clock()

    def rest(self) -> None:
        """Pass it over for a moment, without any blame."""
        self._rests_until = self._clock() + REST_S

    def note_lost(self) -> bool:
        """A request that was there is lost; whether others were with it, so that it need not be what killed it."""
        now, before = self._clock(), self._lost_at
        self._lost_at = now
        return self.outstanding > 0 or (before is not None and now - before < TOGETHER_S)

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
        return self._busy_s + (self._clock() - self._busy_since if self.outstanding else 0.0)

    def lease(self, tokens: int) -> Lease:
        """Account for a request of ``tokens`` new tokens until the lease ends."""
        return Lease(self, tokens)

    def _take(self, lease: Lease) -> None:
        if not self.outstanding:
            self._busy_since = self._clock()
        self.leases.add(lease)
        self.outstanding += 1
        self.outstanding_tokens += lease.tokens
        self.served += 1
        self.served_tokens += lease.tokens

    def _give_back(self, lease: Lease) -> None:
        self.leases.discard(lease)
        self.outstanding -= 1
        self.outstanding_tokens -= lease.tokens
        if not self.outstanding:
            self._busy_s += self._clock() - self._busy_since


class PrefillInstance(Instance):
    """A prefill server: a member of one pool, with an index of the prefixes it has seen."""

    def __init__(self, url: str, bootstrap_port: int | None, pool: Pool, clock: Clock = time.monotonic) -> None:
        super().__init__(url, "prefill", clock)
        host = urlsplit(self.url).hostname or ""
        self.bootstrap_host = f"[{host}]" if ":" in host else host
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
        self._deviation_at = self._clock()

    def _fading(self) -> float:
        return 2.0 ** (-(self._clock() - self._deviation_at) / SPAN_S)

    @property
    def deviation(self) -> float:
        """Mean relative overshoot of the deadlines this router saw (ratio): without new ones it halves every few
        seconds."""
        return self._deviation * self._fading()


class Lease:
    """Work handed to one instance. It ends once: by ``end``, or at the latest with its ``with`` block."""

    __slots__ = ("_open", "_trial", "instance", "leg", "tokens")

    def __init__(self, instance: Instance, tokens: int) -> None:
        self.instance = instance
        self.tokens = tokens
        self.leg: asyncio.Task[Any] | None = None
        """What runs until the first token has come."""
        self._open = False
        self._trial = False

    def __enter__(self) -> Lease:
        self._open = True
        self._trial = self.instance.breaker.enter()
        self.instance._take(self)
        return self

    def end(self) -> None:
        """Take the work off the instance's account; later calls do nothing."""
        if self._open:
            self._open = False
            self.instance._give_back(self)
            if self._trial:
                self.instance.breaker.leave()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.end()


T = TypeVar("T", bound=Instance)


def open_to(instances: Sequence[T], avoid: Collection[Instance]) -> list[T]:
    """Those that a request may go to; ones in ``avoid`` only without any other, and open breakers count only
    while another instance is left: a server that fails is better than none."""
    healthy = [i for i in instances if i.healthy]
    return [i for i in healthy if i.usable and i not in avoid] or [i for i in healthy if i not in avoid] or healthy
