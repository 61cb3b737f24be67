"""What the prefill servers say of their load, and what to go by when they say nothing.

Asked in this order, the best that answers is kept: ``/laps_status`` (a prefill server with LAPS), ``/v1/loads``
(stock SGLang), ``/metrics`` (stock, with --enable-metrics), and last this router's own books.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
from laps_core.pools.demand import Spent
from laps_core.pools.pressure import InstanceSignals, Work
from laps_core.protocol import IDLE, STATUS_ROUTE, Load, PoolRecord, read_status

from .instances import PrefillInstance
from .upstream import Sessions

OWN = "router"
RETRY_S = 60.0
"""How long a server that lacks a route is believed to lack it (seconds): it may come back as another."""

_QUEUE = re.compile(rb"^sglang:num_queue_reqs(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)


class Missing(Exception):
    """The server has no such route, or does not say there what is needed."""


class SignalReader:
    """Reads the signals of one prefill instance, and its pool record. ``read`` never raises: it falls back."""

    def __init__(self, instance: PrefillInstance, sessions: Sessions, api_key: str | None, timeout_s: float) -> None:
        self.instance = instance
        self.load = IDLE
        self.source = OWN
        """Where ``load`` comes from."""
        self._spent = Spent()
        self._busy = Work()
        self._sessions = sessions
        self._key = f"Bearer {api_key}" if api_key else None
        self._timeout_s = timeout_s
        self._level = 0
        self._stepped_at = self.instance.clock()
        self._seen: dict[str, tuple[float, float]] = {}
        """When a counter of busy seconds was last read, and what it was."""
        self._routes: tuple[tuple[str, Callable[[bytes], Load]], ...] = (
            (STATUS_ROUTE, self._laps), ("v1/loads?include=core", self._loads), ("metrics", self._metrics),
        )  # fmt: skip
        """In order of preference."""

    async def read(self) -> None:
        """Refresh ``load``."""
        own = self._own()
        if self._level and self.instance.clock() - self._stepped_at > RETRY_S:
            self._level = 0
        while self.instance.healthy and self._level < len(self._routes):
            path, parse = self._routes[self._level]
            try:
                status, text = await self._sessions.ask(self.instance, path, self._timeout_s, self._key)
                if status != 200:
                    raise Missing
                self.load = parse(text)
                self.source = path.partition("?")[0]
                self.instance.outlook.parks = self._level == 0
                self._tell()
                return
            except (Missing, ValueError, KeyError, TypeError, AttributeError, OverflowError):
                self.instance.take(None)
                self.instance.outlook.own_model = self.instance.longest = None
                self._level += 1
                self._stepped_at = self.instance.clock()
            except (aiohttp.ClientError, OSError):
                # Slow or gone; health is judged elsewhere, and the route is not to blame.
                break
        self.load, self.source = own, OWN
        self._tell()

    def _tell(self) -> None:
        """What was read, for the choice of a server and for the controller."""
        i, load = self.instance, self.load
        now = i.clock()
        said = load.backlog_s
        if said is not None:
            i.outlook.told(now, said.short, said.long)
        else:
            # Of tokens that wait there only the others' are not known already.
            rest_s = max(0.0, load.backlog_tokens - i.outstanding_tokens) * i.outlook.model.linear
            i.outlook.told_others(now, i.pool, rest_s)
        self._busy = self._spent.since(now, load.busy_share, load.busy_s, i.outlook)

    def signals(self) -> InstanceSignals:
        """For the controller."""
        i = self.instance
        return InstanceSignals(
            name=i.url,
            pool=i.pool,
            healthy=i.healthy,
            load=self.load,
            outstanding=i.outstanding_tokens,
            busy=self._busy,
            waiting=i.outlook.waiting(i.clock()),
            parks=i.outlook.parks,
        )

    def _laps(self, text: bytes) -> Load:
        said = read_status(text)
        if said.load is None:
            raise Missing
        self.instance.take(said.pool if isinstance(said.pool, PoolRecord) else None)
        self.instance.outlook.own_model, self.instance.longest = said.model, said.longest
        return said.load

    def _loads(self, text: bytes) -> Load:
        ranks: list[dict[str, Any]] = orjson.loads(text)["loads"]
        if not ranks:
            raise Missing
        backlog = sum(r["num_waiting_uncached_tokens"] for r in ranks)
        busy_s = sum(r.get("total_prefill_busy_us", 0) for r in ranks) / len(ranks) / 1e6
        return self._load(backlog, self._share("theirs", busy_s) or 0.0)

    def _metrics(self, text: bytes) -> Load:
        found = _QUEUE.findall(text)
        if not found:
            raise Missing
        i = self.instance
        mean = i.served_tokens / i.served if i.served else 0.0
        return self._load(sum(map(float, found)) * mean, self.load.busy_share)

    def _own(self) -> Load:
        share = self._share(OWN, self.instance.busy_seconds())
        return self._load(self.instance.outstanding_tokens, self.load.busy_share if share is None else share)

    def _share(self, counter: str, busy_s: float) -> float | None:
        """Growth of a counter of busy seconds over the time since it was last read (0..1); None when that is now."""
        now = self.instance.clock()
        then, before = self._seen.get(counter, (now, busy_s))
        self._seen[counter] = now, busy_s
        return min(max((busy_s - before) / (now - then), 0.0), 1.0) if now > then else None

    def _load(self, backlog: float, share: float) -> Load:
        """With the deadlines that this router saw missed. Raises Missing where a server's number is none."""
        if not (math.isfinite(backlog) and math.isfinite(share)):
            raise Missing
        return Load(backlog_tokens=float(backlog), slo_deviation=self.instance.deviation, busy_share=share)
