"""Choice of a prefill server from the two pools, and of a decode server, for each request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from laps_core.length import LONG, SHORT
from laps_core.pools.arrivals import MOST_WORK_S
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import Move
from laps_core.pools.decode import DecodeInstance, choose_decoder
from laps_core.pools.instances import Clock, Instance, Lease, open_to
from laps_core.pools.offers import Offer, cheapest_offer, choose_offer, list_offers, spill_offers
from laps_core.pools.outlook import Learnt
from laps_core.pools.prefill import Place, PrefillInstance
from laps_core.pools.prefixes import Ask, SharedPrefixes
from laps_core.pools.pressure import BOTH, Pool
from laps_core.pools.ranks import Rank
from laps_core.pools.sessions import SessionTable
from laps_core.protocol import Assignment

Why = Literal["session", "prefix", "expected", "pool", "spill", "copy"]
"""Reason of the choice: the session's last server; a cached part of the prompt; the earliest expected answer, of all
instances or of the pool of its class; overload of its own pool; a copy of a shared prefix to the short pool."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen prefill server, with the predictions that led to it."""

    instance: PrefillInstance
    length_class: Pool
    new_tokens: int
    """Expected new tokens at the instance (>= 1)."""
    cached: int = 0
    """Expected tokens in the instance's prefix cache."""
    work_s: float = 0.0
    """Predicted work that the request adds to the instance (seconds)."""
    rank: Rank[PrefillInstance] | None = None
    """Rank of the instance, if it has several."""
    why: Why = "expected"
    shares: int = 0
    """Blocks at a long-pool server that a short request continues, and that other requests may share; 0 = none."""
    late_s: float = 0.0
    """Predicted delay of the first token after ``Ask.refuse_at`` (seconds): a late request is refused. 0.0 if in time
    or unknown."""

    @property
    def place(self) -> Place:
        """Return the chosen rank, or else the instance."""
        return self.rank or self.instance

    def lease(self) -> Lease:
        """Return a lease that accounts for the request at the instance."""
        return self.instance.lease(self.new_tokens, self.length_class, self.work_s, self.rank)


@dataclass(slots=True)
class TriedServers:
    """Servers and pairs at which a request has failed."""

    servers: set[Instance] = field(default_factory=set)
    """Servers at which the request failed."""
    pairs: set[tuple[PrefillInstance, Instance]] = field(default_factory=set)
    """Pairs between which the KV could not be transferred: either server may be to blame."""


class Pools:
    """Prefill instances by pool, and the decode servers that both pools use. A prefill instance that moves needs no
    draining: its new pool counts for new requests only."""

    def __init__(
        self,
        servers: Sequence[tuple[str, int | None]],
        config: AllocConfig,
        clock: Clock,
        decoders: Sequence[str] = (),
        fixed: bool = True,
    ) -> None:
        """``servers``: (url, bootstrap port) of each prefill server; ``decoders``: URLs; ``fixed``: no server can join
        later. Raises ConfigError if the servers are fixed and do not fit ``config``."""
        if fixed:
            config.check_instances(len(servers))
        self.config = config
        self._clock = clock
        self.learnt = Learnt()
        n_short = config.short_of(len(servers))

        def assigned(i: int) -> Assignment:
            return BOTH if n_short is None else SHORT if i < n_short else LONG

        self.instances = [
            PrefillInstance(url, port, assigned(i), clock=clock, learnt=self.learnt)
            for i, (url, port) in enumerate(servers)
        ]
        self.decoders = [DecodeInstance(url, clock) for url in decoders]
        self.traffic_ratio = 1.0
        """Ratio of all routers' work at the decode servers to this router's."""
        self._shared = SharedPrefixes()
        self._sessions = SessionTable()

    def members(self, pool: Pool) -> list[PrefillInstance]:
        """Return all instances that serve ``pool``, healthy or not."""
        return [i for i in self.instances if i.pool in (pool, BOTH)]

    def by_url(self, url: str) -> PrefillInstance:
        return next(i for i in self.instances if i.url == url)

    def choose_pool(self) -> Assignment:
        """Return the pool for a new prefill server: the pool with fewer servers that are healthy or still unused; both
        in an undivided fleet."""
        sizes = Counter(i.pool for i in self.instances if i.healthy or not i.served)
        if sizes[BOTH] or (not sizes and not self.config.divided):
            return BOTH
        return "short" if not sizes["short"] or sizes["short"] < sizes["long"] else "long"

    def join(self, instance: Instance) -> None:
        """Add ``instance``; it gets requests from now on."""
        if isinstance(instance, PrefillInstance):
            self.instances.append(instance)
        elif isinstance(instance, DecodeInstance):
            self.decoders.append(instance)

    def leave(self, instance: Instance) -> None:
        """Remove ``instance``; it gets no more requests. Sessions still refer to it, but need none of its prefixes."""
        instance.forget()
        if isinstance(instance, PrefillInstance):
            self.instances.remove(instance)
        elif isinstance(instance, DecodeInstance):
            self.decoders.remove(instance)

    def apply(self, move: Move) -> None:
        self.by_url(move.name).pool = move.target

    def forget_prefixes(self) -> None:
        """Forget all prefixes and sessions: the servers' caches are being flushed."""
        self._shared.clear()
        self._sessions.clear()
        for i in self.instances:
            i.flushed()

    def choose_pair(self, ask: Ask, tried: TriedServers, kv_tokens: int = 0) -> tuple[Choice, DecodeInstance] | None:
        """Choose a prefill and a decode server for a request that will hold ``kv_tokens`` KV tokens at the decode
        server; None while a role has no healthy server.

        Prefers servers without a failure of this request, then a new pair, then any pair.
        """
        shunned: Collection[Instance] = ()
        avoid: Collection[PrefillInstance] = ()
        if tried.servers or tried.pairs:
            shunned = tried.servers.union(*tried.pairs)
            avoid = [p for p in self.instances if p in shunned]
            if all(p in shunned for p in self.instances if p.healthy):
                avoid = [p for p in self.instances if not self._untried_decoders(p, tried)]
        usable = open_to(self.decoders, shunned)
        choice = self.choose(ask, avoid) if usable else None
        if choice is None:
            return None
        if shunned:
            usable = open_to(self._untried_decoders(choice.instance, tried) or self.decoders, shunned)
        return choice, choose_decoder(usable, kv_tokens, self.traffic_ratio)

    def _untried_decoders(self, prefiller: PrefillInstance, tried: TriedServers) -> list[DecodeInstance]:
        """Return the healthy decode servers with which ``prefiller`` makes an untried pair."""
        if prefiller in tried.servers:
            return []
        old = {d for p, d in tried.pairs if p is prefiller} | tried.servers
        return [d for d in self.decoders if d.healthy and d not in old]

    def has_untried_pair(self, tried: TriedServers, *, now: bool) -> bool:
        """Return True if there is an untried pair of healthy servers. ``now``: both must admit requests at once, which
        a server with an open breaker does only later."""
        return any(
            (d.usable and p.usable) if now else p.healthy
            for p in self.instances
            for d in self._untried_decoders(p, tried)
        )

    def missing_role(self) -> str:
        """Return the role that has no healthy server."""
        return "decode" if any(i.healthy for i in self.instances) else "prefill"

    def choose(self, ask: Ask, avoid: Collection[PrefillInstance] = ()) -> Choice | None:
        """Choose the instance for a request, and its data-parallel rank; None if no instance is healthy.

        Changes nothing; see ``record_choice``. The request goes to the best offer of the instances that take its class.
        The class depends on the place: a request is short if at most ``threshold`` tokens are new there. A request that
        is short only at a place with its history cached may stay there. If other requests share that history, one of
        them takes it to the short pool. Instances in ``avoid`` are used only if no other is healthy. A session named by
        the client stays at its last server, in either pool.
        """
        usable = open_to(self.instances, avoid)
        total = max(1, ask.total)
        usable = [i for i in usable if i.longest is None or total <= i.longest] or usable
        if not usable:
            return None
        now, threshold = self._clock(), self.config.threshold
        why: Why = "session"
        shares = 0
        holder = self._sessions.holder(ask, usable, now, threshold)
        own, others = list[Offer](), list[Offer]()
        if holder is None:
            own, others = list_offers(usable, ask, now, threshold)
            _, new, chosen, _ = choose_offer(own or others, ask)
            why = "spill" if not own else "pool" if others else "expected"
        else:
            new, chosen = ask.new(holder.prefixes), holder
        length_class = SHORT if new <= threshold else LONG
        if own and others and chosen.pool == length_class:
            helpers = spill_offers(self.config, length_class, own, others)
            if helpers:
                why = "spill"
                _, new, chosen, _ = choose_offer(helpers, ask)
        elif own and chosen.pool == LONG and length_class == SHORT:
            # Of a batch of prompts nothing is copied.
            shares = chosen.prefixes.depth(ask.prompts[0]) if len(ask.prompts) == 1 else 0
            host = self._host_of_copy(ask, shares, others)
            if host is not None:
                # The short pool computes the whole prompt, as for a long request.
                length_class, why = LONG, "copy"
                _, new, chosen, _ = host
        late_s = 0.0
        if ask.refuse_at < math.inf:
            first_s = chosen.outlook.first_s(now, new, total - new, length_class == SHORT)
            late_s = max(0.0, now + first_s - ask.refuse_at) if first_s is not None else 0.0
        if why in ("pool", "expected") and new < total:
            why = "prefix"
        work_s = min(chosen.outlook.model.work_s(new, total - new), MOST_WORK_S)
        return Choice(chosen.server, length_class, new, total - new, work_s, chosen.rank, why, shares, late_s)

    def record_choice(self, ask: Ask, choice: Choice) -> None:
        """Record that the request goes to ``choice``, where its prompt will be cached and its session continues."""
        self._sessions.served(ask.session, choice.place)
        if choice.shares:
            self._shared.note(ask.prompts[0], choice.shares)
            if choice.why == "copy":
                self._shared.copied(ask.prompts[0], choice.shares)
        for p in ask.prompts:
            if p.hashes:
                choice.place.prefixes.add(p)
                p.prompt = None

    def _host_of_copy(self, ask: Ask, shares: int, others: list[Offer]) -> Offer | None:
        """Return the cheapest offer of the short pool, to cache the first ``shares`` blocks of a request that is short
        only in the long pool; None if the blocks are not due for a copy, or if the place is overloaded."""
        if not shares or not self._shared.due(ask.prompts[0], shares):
            return None
        hosts = [o for o in others if o[2].pool == SHORT]
        host = cheapest_offer(hosts) if hosts else None
        return None if host is None or host[2].outstanding_tokens > self.config.load_unit else host
