"""Load reported by the prefill servers, with fallbacks.

The first of these that answers is used: ``/laps_status`` (a prefill server with LAPS), ``/v1/loads`` (stock SGLang),
``/metrics`` (stock, with --enable-metrics), and last this router's own statistics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import aiohttp
import msgspec
from laps_core.pools.config import AllocConfig
from laps_core.pools.demand import BusySplit
from laps_core.pools.prefill import PREFIX_TOKENS, SPAN_S, PrefillInstance, record_others_work
from laps_core.pools.pressure import InstanceSignals, Work
from laps_core.pools.stock import LOADS, SERVER_INFO, Missing, count_ranks, read_loads
from laps_core.protocol import IDLE, MAX_AGE, STATUS_ROUTE, GroupStatus, Load, PoolRecord, read_status
from msgspec import structs

from .reader import RETRY_S, Reader
from .upstream import Sessions

OWN = "router"
OTHERS = 0.2
"""Excess of a server's busy share over this router's share that shows that other routers use the server (0..1)."""
FRESH = 0.8
"""Largest age of an answer, in polling periods: all routers that poll within a period may share an answer."""

_QUEUE = re.compile(rb"^sglang:num_queue_reqs(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)


class SignalReader(Reader):
    """Poller of one prefill instance: its signals, its ranks and its pool record. ``read`` never raises, but uses a
    fallback."""

    def __init__(
        self, instance: PrefillInstance, sessions: Sessions, period_s: float, threshold: int = AllocConfig().threshold
    ) -> None:
        """``threshold``: longest short request (tokens)."""
        super().__init__(instance, sessions, period_s)
        status = f"{STATUS_ROUTE}?{MAX_AGE}={FRESH * period_s:g}"
        self.routes = ((status, self._laps), (LOADS, self._loads), ("metrics", self._metrics))
        self.instance = instance
        self.load = IDLE
        self.source = OWN
        """Source of ``load``."""
        self._busy_split = BusySplit()
        self._busy = self._arrived = Work()
        self._own_share = 0.0
        """Share of the time in which this router had work in flight at the server (0..1)."""
        self._threshold = threshold
        self._reported = IDLE
        """Load in the latest report."""
        self._reported_at = instance.clock()
        """Time of that load, by the clock of the instance (seconds)."""
        self._by_rank: Mapping[int, Load] = {}
        self.group: GroupStatus | None = None
        """Plan shared by the server's data-parallel attention ranks, in the latest report; None if there is none."""
        self._rank_count: tuple[int, int, float] | None = None
        """Ranks of a stock server, number of ranks that its bootstrap rooms select from, and the time of that
        answer."""
        self._seen: dict[str, tuple[float, float]] = {}
        """Last reading of each counter of busy seconds: its time and value."""

    async def read(self) -> None:
        """Refresh ``load``: from the server's report, from its last report if a new report is late, or from this
        router's own statistics if the server is unhealthy or does not report."""
        i, own = self.instance, self._own()
        route = await self.poll()
        if route != STATUS_ROUTE:
            self.group = None
        if route != STATUS_ROUTE and self._level:
            i.adopt_record(None)
            i.set_capabilities(False, None, None)
            i.set_cache_size(None)
            if i.outlook.arrivals.lengths:
                i.outlook.arrivals.forget()
        if route is None and not self.bare and self.source != OWN and i.healthy:
            self.load = self._aged(own)
            return
        if route is None:
            self._by_rank = {}
            if self.bare:
                i.set_rank_count(1)
            self._record_load(own)
        self.source, self.load = route or OWN, self._reported

    def _aged(self, own: Load) -> Load:
        """Return the last reported load, with the backlog halved every SPAN_S, but at least this router's own
        backlog."""
        rest = self._reported.backlog_tokens * 2.0 ** (-(self.instance.clock() - self._reported_at) / SPAN_S)
        return structs.replace(self._reported, backlog_tokens=max(own.backlog_tokens, rest))

    def _record_load(self, load: Load, age_s: float = 0.0, counted_at: float | None = None) -> None:
        """Take in a report of ``age_s`` seconds ago, and pass it on to the choice of a server at once, because this
        router's own share changes quickly. ``counted_at``: its time by the clock of its counters (seconds)."""
        i, arrivals = self.instance, self.instance.outlook.arrivals
        at = i.clock() - age_s
        self._reported, self._reported_at = load, at
        record_others_work(at, i, load, len(i.places))
        for p in i.places:
            if p.rank is not None:
                record_others_work(at, p, self._by_rank.get(p.rank.number, IDLE))
        counted_at = at if counted_at is None else counted_at
        self._busy = self._busy_split.since(counted_at, load.busy_share, load.busy_s, i.outlook)
        self._arrived = arrivals.since(counted_at if arrivals.lengths else at)

    def signals(self) -> InstanceSignals:
        i = self.instance
        return InstanceSignals(
            name=i.url,
            pool=i.pool,
            healthy=i.healthy,
            load=self.load,
            outstanding=i.outstanding_tokens,
            busy=self._busy,
            # A server with LAPS that does not count requests may also serve other routers: then its busy time counts.
            arrived=self._arrived if self.source != STATUS_ROUTE or i.outlook.arrivals.lengths else None,
            waiting=i.outlook.waiting(i.clock()),
            parks=i.outlook.parks,
        )

    async def _laps(self, text: bytes) -> None:
        said, i = read_status(text), self.instance
        if said.load is None:
            raise Missing
        if self._polled_at >= i.record_at:
            # Otherwise the answer may be older than a record that this router has set meanwhile.
            i.adopt_record(said.pool if isinstance(said.pool, PoolRecord) else None)
        i.set_rank_count(1 if said.dp_size is msgspec.UNSET else said.dp_size)
        i.set_capabilities(True, said.model, said.longest)
        i.set_cache_size(said.holds)
        ranks = [] if said.ranks is msgspec.UNSET else said.ranks
        self._by_rank = {r.dp_rank: r.load for r in ranks if r.load is not None}
        self.group = next((r.group for r in ranks if r.group is not None and r.group.on), None)
        if said.lengths is not None:
            i.outlook.arrivals.add_counts(said.lengths, i.outlook.model, self._threshold)
        # The server's own clock distinguishes a cached answer from a new one.
        self._record_load(said.load, said.age_s, None if said.lengths is None else said.lengths.seconds)

    async def _loads(self, text: bytes) -> None:
        ranks = read_loads(text)
        waiting = [r.num_waiting_uncached_tokens for r in ranks if r.num_waiting_uncached_tokens is not None]
        if len(waiting) < len(ranks):
            raise Missing
        busy_s = sum(r.total_prefill_busy_us for r in ranks) / len(ranks) / 1e6
        share = self._share("theirs", busy_s)
        share = self._reported.busy_share if share is None else share
        self.instance.set_rank_count(await self._size(len(ranks)))
        # The host memory may hold more cached tokens, but the server does not report them.
        self.instance.set_cache_size(max(PREFIX_TOKENS, *(r.max_total_num_tokens for r in ranks)))
        self._by_rank = {r.dp_rank: self._load(n, 0.0) for r, n in zip(ranks, waiting, strict=True)}
        self.instance.outlook.set_shared(share > self._own_share + OTHERS)
        self._record_load(self._load(sum(waiting), share))

    async def _size(self, ranks: int) -> int:
        """Return the number of ranks that a stock server selects from by bootstrap room; 1 if it uses another method or
        reports none. ``ranks``: number of its ranks in the load report."""
        if ranks == 1:
            return 1
        now = self.instance.clock()
        if self._rank_count is None or self._rank_count[0] != ranks or now - self._rank_count[2] > RETRY_S:
            try:
                size = count_ranks(await self.get(SERVER_INFO))
            except (Missing, ValueError):
                size = 1
            except (aiohttp.ClientError, OSError):
                return len(self.instance.places)
            self._rank_count = ranks, size, now
        return self._rank_count[1]

    async def _metrics(self, text: bytes) -> None:
        found = _QUEUE.findall(text)
        if not found:
            raise Missing
        i = self.instance
        mean = i.served_tokens / i.served if i.served else 0.0
        i.set_rank_count(1)
        self._by_rank = {}
        self._record_load(self._load(sum(map(float, found)) * mean, self._own_share))

    def _own(self) -> Load:
        share = self._share(OWN, self.instance.busy_seconds())
        self._own_share = self._own_share if share is None else share
        return self._load(self.instance.outstanding_tokens, self._own_share)

    def _share(self, counter: str, busy_s: float) -> float | None:
        """Return the growth of a counter of busy seconds, divided by the time since its last reading (0..1); None if no
        time has passed."""
        now = self.instance.clock()
        then, before = self._seen.get(counter, (now, busy_s))
        self._seen[counter] = now, busy_s
        return min(max((busy_s - before) / (now - then), 0.0), 1.0) if now > then else None

    def _load(self, backlog: float, share: float) -> Load:
        """Return a load with the deviation from deadlines that this router has measured. Raises Missing if a number is
        not finite."""
        if not (math.isfinite(backlog) and math.isfinite(share)):
            raise Missing
        return Load(backlog_tokens=float(backlog), slo_deviation=self.instance.deviation, busy_share=share)
