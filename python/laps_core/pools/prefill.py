"""Prefill servers behind the router: their pool, their cached prefixes, and when they would answer."""

from __future__ import annotations

import math

from laps_core.latency.step import Coefficients
from laps_core.pools.instances import Clock, Instance, Lease
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.prefixes import PrefixIndex
from laps_core.pools.pressure import BOTH
from laps_core.pools.ranks import RANKS_MAX, Rank
from laps_core.protocol import Assignment, Load, PoolRecord
from laps_core.slo import overshoot

SPAN_S = 5.0
"""Half-life of the lateness and backlog that this router has seen at an instance (seconds)."""
PREFIX_TOKENS = 1 << 20
"""Size of the prefix index for a server that does not report its prefix cache (tokens)."""
PREFIX_TOKENS_MOST = 1 << 24
"""Largest prefix index of a server, no matter what the server reports (tokens): this takes 35 MB in the router."""


class PrefillInstance(Instance):
    """A prefill server: a member of one pool or of both, with an index of its cached prefixes."""

    def __init__(
        self,
        url: str,
        bootstrap_port: int | None,
        pool: Assignment = BOTH,
        *,
        clock: Clock,
        learnt: Learnt | None = None,
    ) -> None:
        """``learnt``: latency model for servers that report none, shared within one router."""
        super().__init__(url, "prefill", clock)
        self.bootstrap_port = bootstrap_port
        self.pool: Assignment = pool
        self.record: PoolRecord | None = None
        """Pool record stored by the server; None if it stores none."""
        self.record_at = -math.inf
        """Time at which ``record`` was last read or set."""
        self.prefixes = PrefixIndex(PREFIX_TOKENS)
        self._learnt = learnt or Learnt()
        self.outlook = Outlook(self._learnt)
        """Predicted answer times of the server; with several ranks, for the mean of their work."""
        self.places: tuple[Place, ...] = (self,)
        """Targets of requests: the server's data-parallel ranks, or the server itself if it has one rank."""
        self.server = self
        self.rank: Rank[PrefillInstance] | None = None
        """Always None: this place is a whole server."""
        self.longest: int | None = None
        """Longest prompt that the server's memory holds (tokens); None if unknown."""
        self._deviation = 0.0
        self._deviation_at = clock()

    def adopt_record(self, record: PoolRecord | None) -> None:
        """Adopt the pool record that the server stores for all routers."""
        self.record, self.record_at = record, self.clock()
        if record and record.assignment:
            self.pool = record.assignment

    @property
    def prefix_blocks(self) -> int:
        """Return the number of blocks in the prefix indexes of all places."""
        return sum(len(p.prefixes) for p in self.places)

    def set_rank_count(self, ranks: int) -> None:
        """Set the number of data-parallel ranks that bootstrap rooms select. A new number replaces all ranks."""
        ranks = ranks if 1 < ranks <= RANKS_MAX else 1
        if ranks == len(self.places):
            return
        self.prefixes.clear()
        self.places = (self,)
        if ranks > 1:
            self.places = tuple(Rank(self, n, ranks, self._learnt, PREFIX_TOKENS) for n in range(ranks))

    def set_cache_size(self, tokens: int | None) -> None:
        """Set the size of the prefix cache of the server, or of each of its ranks (tokens); None if unknown."""
        tokens = PREFIX_TOKENS if tokens is None else min(tokens, PREFIX_TOKENS_MOST)
        for p in self.places:
            p.prefixes.bound(tokens if p.rank is None else p.rank.share(tokens))

    def set_capabilities(self, parks: bool, model: Coefficients | None, longest: int | None) -> None:
        """Store whether the server runs LAPS (``parks``), its latency model and its longest prompt; None if unknown."""
        self.longest = longest
        for o in (self.outlook, *(p.outlook for p in self.places)):
            o.parks, o.own_model = parks, model

    def flushed(self) -> None:
        """Empty all prefix indexes, because the server's cache is empty."""
        for p in self.places:
            p.prefixes.clear()

    def forget(self) -> None:
        self.flushed()
        self.set_rank_count(1)

    def entered(self, lease: Lease) -> None:
        rank, work_s = lease.rank, lease.work_s
        now = self.clock()
        if rank is not None:
            rank.entered(now, lease.tokens, lease.length_class, work_s)
            work_s /= rank.of
        self.outlook.enter(now, lease.length_class, work_s)

    def left(self, lease: Lease, answered: bool) -> None:
        rank, work_s, tokens = lease.rank, lease.work_s, lease.tokens if answered else 0
        now = self.clock()
        if rank is not None:
            rank.left(now, lease.tokens, lease.length_class, work_s, answered)
            # The rank's outlook has learnt from this request already.
            work_s, tokens = work_s / rank.of, 0
        self.outlook.leave(now, lease.length_class, work_s, tokens)

    def note_ttft(self, seconds: float, slo_s: float) -> None:
        """Record one time to first token and its deadline (seconds)."""
        keep = 0.8 * self._fading()
        self._deviation = self._deviation * keep + overshoot(seconds, slo_s) * (1 - keep)
        self._deviation_at = self.clock()

    def _fading(self) -> float:
        return float(2.0 ** (-(self.clock() - self._deviation_at) / SPAN_S))

    @property
    def deviation(self) -> float:
        """Return the mean relative overshoot of deadlines seen by this router (ratio); without new requests it halves
        every SPAN_S."""
        return self._deviation * self._fading()


Place = PrefillInstance | Rank[PrefillInstance]
"""Target of a request: a prefill server, or one of its data-parallel ranks."""


def record_others_work(now: float, place: Place, load: Load, ranks: int = 1) -> None:
    """Report other routers' part of ``load`` to the outlook of ``place``; for several ``ranks``, their mean."""
    said, outlook = load.backlog_s, place.outlook
    if said is not None:
        outlook.record_work(now, said.short, said.long)
    else:
        # The outlook already knows this router's own tokens.
        rest_s = max(0.0, load.backlog_tokens - place.outstanding_tokens) * outlook.model.linear
        outlook.record_others_work(now, place.pool, rest_s / ranks)
