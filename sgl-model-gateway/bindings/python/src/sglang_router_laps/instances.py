"""The servers behind the router, and what each has in flight."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

from sglang_laps.policy.pressure import Pool
from yarl import URL

from .prefixes import PrefixIndex

Role = Literal["prefill", "decode"]
Clock = Callable[[], float]

SPAN_S = 5.0
"""Over about how long the router's own view of an instance is averaged (seconds)."""


MOST_OVERSHOOT = 10.0
"""Beyond it one late request says no more (ratio): a client may ask for what no server can do."""


class Instance:
    """One prefill or decode server: address, health, and work in flight as this router knows it."""

    def __init__(self, url: str, role: Role, clock: Clock = time.monotonic) -> None:
        self.url = url.rstrip("/")
        self.role = role
        self.healthy = True
        self.failures = 0
        """Consecutive failures since the last success."""
        self.outstanding = 0
        """Requests in flight."""
        self.outstanding_tokens = 0
        """New tokens in flight."""
        self.served = 0
        """Requests handed to it so far."""
        self.served_tokens = 0
        self.lost = 0
        """Requests that ended because the connection did."""
        self._clock = clock
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self._urls: dict[str, URL] = {}

    def address(self, path: str) -> URL:
        """The URL of one of its routes, parsed once."""
        found = self._urls.get(path)
        if found is None:
            found = self._urls[path] = URL(f"{self.url}/{path}")
        return found

    def busy_seconds(self) -> float:
        """Time it has had anything in flight since the start (seconds)."""
        running = 0.0 if self._busy_since is None else self._clock() - self._busy_since
        return self._busy_s + running

    def lease(self, tokens: int) -> Lease:
        """Account for a request of ``tokens`` new tokens until the lease ends."""
        return Lease(self, tokens)

    def _take(self, tokens: int) -> None:
        if not self.outstanding:
            self._busy_since = self._clock()
        self.outstanding += 1
        self.outstanding_tokens += tokens
        self.served += 1
        self.served_tokens += tokens

    def _give_back(self, tokens: int) -> None:
        self.outstanding -= 1
        self.outstanding_tokens -= tokens
        if not self.outstanding and self._busy_since is not None:
            self._busy_s += self._clock() - self._busy_since
            self._busy_since = None


class PrefillInstance(Instance):
    """A prefill server: a member of one pool, with an index of the prefixes it has seen."""

    def __init__(
        self,
        url: str,
        bootstrap_port: int | None,
        pool: Pool,
        prefix_tokens: int = 1 << 20,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(url, "prefill", clock)
        host = urlsplit(self.url).hostname or ""
        self.bootstrap_host = f"[{host}]" if ":" in host else host
        self.bootstrap_port = bootstrap_port
        self.pool: Pool = pool
        self.prefixes = PrefixIndex(prefix_tokens)
        self.parks = False
        """It is known to run LAPS: a long prefill there is parked while short ones run."""
        self.deviation = 0.0
        """Mean relative overshoot of the deadlines this router saw, decaying (ratio)."""
        self._deviation_at = clock()

    def note_ttft(self, seconds: float, slo_s: float) -> None:
        """Take in one first token and its deadline (seconds)."""
        now = self._clock()
        keep = 0.8 * 2 ** (-(now - self._deviation_at) / SPAN_S)
        self._deviation_at = now
        self.deviation = self.deviation * keep + min(max(0.0, seconds / slo_s - 1), MOST_OVERSHOOT) * (1 - keep)

    def current_deviation(self) -> float:
        """``deviation`` as of now: without new deadlines it halves every few seconds."""
        return self.deviation * 2 ** (-(self._clock() - self._deviation_at) / SPAN_S)


class Lease:
    """Work handed to one instance. It ends once: by ``end``, or at the latest with its ``with`` block."""

    __slots__ = ("_open", "instance", "tokens")

    def __init__(self, instance: Instance, tokens: int) -> None:
        self.instance = instance
        self.tokens = tokens
        self._open = False

    def __enter__(self) -> Lease:
        self._open = True
        self.instance._take(self.tokens)
        return self

    def end(self) -> None:
        """Take the work off the instance's account; later calls do nothing."""
        if self._open:
            self._open = False
            self.instance._give_back(self.tokens)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.end()
