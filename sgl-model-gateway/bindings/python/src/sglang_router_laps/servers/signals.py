"""What the prefill servers say of their load, and what to go by when they say nothing.

Asked in this order, the best that answers is kept: ``/laps_status`` (a prefill server with LAPS), ``/v1/loads``
(stock SGLang), ``/metrics`` (stock, with --enable-metrics), and last this router's own books.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import aiohttp
import msgspec
from laps_core.pools.demand import Spent
from laps_core.pools.pressure import InstanceSignals, Work
from laps_core.protocol import IDLE, STATUS_ROUTE, Count, Load, PoolRecord, read, read_status

from .instances import Place, PrefillInstance
from .reader import LOADS, RETRY_S, Missing, Reader, read_loads
from .upstream import Sessions

OWN = "router"
SERVER_INFO = "server_info"
BY_ROOM = "follow_bootstrap_room"
"""Of SGLang's --load-balance-method: a request goes to the rank that its room names."""

_QUEUE = re.compile(rb"^sglang:num_queue_reqs(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)


class _ServerInfo(msgspec.Struct, frozen=True):
    dp_size: Count
    attn_dp_size: Count = 1
    load_balance_method: str = ""


class SignalReader(Reader):
    """Reads the signals of one prefill instance, its ranks, and its pool record. ``read`` never raises: it falls
    back."""

    def __init__(self, instance: PrefillInstance, sessions: Sessions, api_key: str | None, timeout_s: float) -> None:
        super().__init__(instance, sessions, api_key, timeout_s)
        self.routes = ((STATUS_ROUTE, self._laps), (LOADS, self._loads), ("metrics", self._metrics))
        self.instance = instance
        self.load = IDLE
        self.source = OWN
        """Where ``load`` comes from."""
        self._spent = Spent()
        self._busy = Work()
        self._by_rank: Mapping[int, Load] = {}
        self._sized: tuple[int, int, float] | None = None
        """Ranks that a stock server has told of, to how many of them it deals out by room, and when it said so."""
        self._seen: dict[str, tuple[float, float]] = {}
        """When a counter of busy seconds was last read, and what it was."""

    async def read(self) -> None:
        """Refresh ``load``."""
        i, own = self.instance, self._own()
        self._by_rank = {}
        route = await self.ask()
        if route != STATUS_ROUTE and self._level:
            i.take(None)
            i.is_known(False, None, None)
        if route is None:
            self.load = own
            if self.bare:
                i.spread(1)
        self.source = route or OWN
        self._tell()

    def _tell(self) -> None:
        """What was read, for the choice of a server and for the controller."""
        i = self.instance
        now = i.clock()
        _tell_others(now, i, self.load, len(i.places))
        for p in i.places:
            if p.rank is not None:
                _tell_others(now, p, self._by_rank.get(p.rank.number, IDLE))
        self._busy = self._spent.since(now, self.load.busy_share, self.load.busy_s, i.outlook)

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

    async def _laps(self, text: bytes) -> None:
        said, i = read_status(text), self.instance
        if said.load is None:
            raise Missing
        i.take(said.pool if isinstance(said.pool, PoolRecord) else None)
        i.spread(1 if said.dp_size is msgspec.UNSET else said.dp_size)
        i.is_known(True, said.model, said.longest)
        ranks = [] if said.ranks is msgspec.UNSET else said.ranks
        self._by_rank = {r.dp_rank: r.load for r in ranks if r.load is not None}
        self.load = said.load

    async def _loads(self, text: bytes) -> None:
        ranks = read_loads(text)
        waiting = [r.num_waiting_uncached_tokens for r in ranks if r.num_waiting_uncached_tokens is not None]
        if len(waiting) < len(ranks):
            raise Missing
        busy_s = sum(r.total_prefill_busy_us for r in ranks) / len(ranks) / 1e6
        self.load = self._load(sum(waiting), self._share("theirs", busy_s) or 0.0)
        self.instance.spread(await self._size(len(ranks)))
        self._by_rank = {r.dp_rank: self._load(n, 0.0) for r, n in zip(ranks, waiting, strict=True)}

    async def _size(self, ranks: int) -> int:
        """To how many of its ``ranks`` a stock server deals requests out by their rooms; 1: it has another rule, or
        does not say."""
        if ranks == 1:
            return 1
        now = self.instance.clock()
        if self._sized is None or self._sized[0] != ranks or now - self._sized[2] > RETRY_S:
            try:
                said = read(await self.get(SERVER_INFO), _ServerInfo)
                size = said.dp_size * said.attn_dp_size if said.load_balance_method == BY_ROOM else 1
            except (Missing, ValueError):
                size = 1
            except (aiohttp.ClientError, OSError):
                return len(self.instance.places)
            self._sized = ranks, size, now
        return self._sized[1]

    async def _metrics(self, text: bytes) -> None:
        found = _QUEUE.findall(text)
        if not found:
            raise Missing
        i = self.instance
        mean = i.served_tokens / i.served if i.served else 0.0
        self.load = self._load(sum(map(float, found)) * mean, self.load.busy_share)
        i.spread(1)

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


def _tell_others(now: float, place: Place, load: Load, ranks: int = 1) -> None:
    """What of ``load`` other routers have sent; where it is of so many ``ranks``, the mean of them."""
    said, outlook = load.backlog_s, place.outlook
    if said is not None:
        outlook.told(now, said.short, said.long)
    else:
        # Of tokens that wait there only the others' are not known already.
        rest_s = max(0.0, load.backlog_tokens - place.outstanding_tokens) * outlook.model.linear
        outlook.told_others(now, place.pool, rest_s / ranks)
