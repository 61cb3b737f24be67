"""Which servers get a request: a prefill server out of the two pools, and a decode server."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal

from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT
from laps_core.pools.controller import Move
from laps_core.pools.outlook import Learnt
from laps_core.pools.pressure import BOTH, Assignment, Pool

from ..config import AllocConfig
from ..prompts.prefixes import Ask, Fingerprint, PrefixIndex, SharedPrefixes
from ..servers.decode import DecodeInstance, roomiest
from ..servers.instances import Clock, Instance, Lease, Place, PrefillInstance, open_to
from ..servers.ranks import Rank
from .sessions import SessionTable

MOST_WORK_S = 3600.0
"""No request is taken for more work, whatever a server says of its speed (seconds): sums stay finite."""
EASE = 0.5
"""A deadline is kept with ease by who is expected to need this share of it: expectations err."""
Offer = tuple[float, int, Place, float]
"""A place for a request: its cost there (seconds), the tokens to be computed there, the place, and the part of the cost
that other requests bear (seconds)."""
BEHIND = 3.0
"""Requests that come later wait for this one's work, too: it counts so many times beside the request's own wait. A
prefix that is computed anew takes the device from everybody; by its own wait alone a request would leave it too often.
"""
_cost = itemgetter(0)
NOTHING = PrefixIndex(0)
FLOOD = 8
"""A pool with this many times ``load_unit`` in flight everywhere need not find an idle instance to spill long
requests to: one with as many times less in flight does."""


Why = Literal["session", "prefix", "expected", "pool", "spill", "copy"]
"""Why: its session is there; it holds a part of the prompt; it is expected to answer first, of all or of the pool of
its class; its own pool is overloaded; a prefix that many share is to be held there."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and what it is taken for."""

    instance: PrefillInstance
    length_class: Pool
    new_tokens: int
    """Tokens expected to be computed there (>= 1)."""
    cached: int = 0
    """Tokens expected in its prefix cache."""
    work_s: float = 0.0
    """What the request adds to its work (seconds)."""
    spilled: bool = False
    """It went to the other pool because its own is overloaded or has nobody healthy."""
    copies: bool = False
    """It went to the short pool so that the prefix it shares with others is held there from now on."""
    rank: Rank[PrefillInstance] | None = None
    """Of the instance, where it has several."""
    why: Why = "expected"
    late_s: float = 0.0
    """So long after the time from which it is to be refused its first token is expected (seconds); 0.0: in time, or
    that is not known."""

    @property
    def place(self) -> Place:
        """The instance, or its rank."""
        return self.rank or self.instance

    def lease(self) -> Lease:
        """Account for it at the instance."""
        return self.instance.lease(self.new_tokens, self.length_class, self.work_s, self.rank)


@dataclass(slots=True)
class Tried:
    """Where a request has been in vain."""

    servers: set[Instance] = field(default_factory=set)
    """These failed it."""
    ways: set[tuple[PrefillInstance, Instance]] = field(default_factory=set)
    """Between these two the KV could not be handed over: either may be the one to leave."""


class Pools:
    """Prefill instances by pool, and the decode servers behind both. A prefill instance that moves drains by itself:
    only new requests follow."""

    def __init__(
        self,
        servers: Sequence[tuple[str, int | None]],
        config: AllocConfig,
        clock: Clock = time.monotonic,
        decoders: Sequence[str] = (),
        fixed: bool = True,
    ) -> None:
        """``servers``: (url, bootstrap port) of each prefill server; ``decoders``: URLs. Raises ConfigError when they
        are all there will be (``fixed``) and do not fit ``config``."""
        if fixed:
            config.check_instances(len(servers))
        self.config = config
        self._clock = clock
        self.learnt = Learnt()
        n_short = config.short_of(len(servers))

        def assigned(i: int) -> Assignment:
            return BOTH if n_short is None else SHORT if i < n_short else LONG

        self.instances = [
            PrefillInstance(url, port, assigned(i), clock, self.learnt) for i, (url, port) in enumerate(servers)
        ]
        self.decoders = [DecodeInstance(url, clock) for url in decoders]
        self.traffic = 1.0
        """How many times this router's work there is at the decode servers in all, other routers' included."""
        self._shared = SharedPrefixes()
        self._sessions = SessionTable()

    def members(self, pool: Pool) -> list[PrefillInstance]:
        """All instances that serve ``pool``, healthy or not."""
        return [i for i in self.instances if i.pool in (pool, BOTH)]

    def by_url(self, url: str) -> PrefillInstance:
        """The instance at ``url``."""
        return next(i for i in self.instances if i.url == url)

    def place(self) -> Assignment:
        """The pool for one more prefill server: that with fewer which are well, or have had no time to be; both in an
        undivided fleet."""
        sizes = Counter(i.pool for i in self.instances if i.healthy or not i.served)
        if sizes[BOTH] or (not sizes and not self.config.divided):
            return BOTH
        return "short" if not sizes["short"] or sizes["short"] < sizes["long"] else "long"

    def join(self, instance: Instance) -> None:
        """From now on it gets requests."""
        if isinstance(instance, PrefillInstance):
            self.instances.append(instance)
        elif isinstance(instance, DecodeInstance):
            self.decoders.append(instance)

    def leave(self, instance: Instance) -> None:
        """It gets no more requests."""
        if isinstance(instance, PrefillInstance):
            self.instances.remove(instance)
        elif isinstance(instance, DecodeInstance):
            self.decoders.remove(instance)

    def apply(self, move: Move) -> None:
        """Carry out a move of the controller."""
        self.by_url(move.name).pool = move.target

    def forget_prefixes(self) -> None:
        """The servers' caches are being flushed."""
        self._shared.clear()
        self._sessions.clear()
        for i in self.instances:
            i.flushed()

    def choose_pair(self, ask: Ask, tried: Tried, kv_tokens: int = 0) -> tuple[Choice, DecodeInstance] | None:
        """A prefill and a decode server for a request, which is to hold ``kv_tokens``; None while a role has nobody
        healthy.

        Rather two servers that had no part in a failure, then a pair that is new, then any.
        """
        shunned: Collection[Instance] = ()
        avoid: Collection[PrefillInstance] = ()
        if tried.servers or tried.ways:
            shunned = tried.servers.union(*tried.ways)
            avoid = [p for p in self.instances if p in shunned]
            if all(p in shunned for p in self.instances if p.healthy):
                avoid = [p for p in self.instances if not self._new(p, tried)]
        usable = open_to(self.decoders, shunned)
        choice = self.choose(ask, avoid) if usable else None
        if choice is None:
            return None
        if shunned:
            usable = open_to(self._new(choice.instance, tried) or self.decoders, shunned)
        return choice, roomiest(usable, kv_tokens, self.traffic)

    def _new(self, prefiller: PrefillInstance, tried: Tried) -> list[DecodeInstance]:
        """Healthy decode servers that make a new pair with ``prefiller``."""
        if prefiller in tried.servers:
            return []
        old = {d for p, d in tried.ways if p is prefiller} | tried.servers
        return [d for d in self.decoders if d.healthy and d not in old]

    def left(self, tried: Tried, *, now: bool) -> bool:
        """Whether there is a new pair; ``now``: with room at once. A server on trial has none now, but soon."""
        return any((d.usable and p.usable) if now else p.healthy for p in self.instances for d in self._new(p, tried))

    def missing(self) -> str:
        """The role that has nobody healthy."""
        return "decode" if any(i.healthy for i in self.instances) else "prefill"

    def choose(self, ask: Ask, avoid: Collection[PrefillInstance] = ()) -> Choice | None:
        """The instance for a request, and which of its data-parallel ranks; None when nobody is healthy.

        It is the one where the request is answered first, of those that take its class. The class is a matter of the
        place: short is what leaves at most the threshold to compute there. A request that is short only where its
        history lies may stay there, unless others share that history: then one of them takes it to the short pool.
        Instances in ``avoid`` are taken only when there is no other. A session that the client names goes on where it
        was served, in either pool.
        """
        usable = open_to(self.instances, avoid)
        total = max(1, ask.total)
        usable = [i for i in usable if i.longest is None or total <= i.longest] or usable
        if not usable:
            return None
        now, threshold = self._clock(), self.config.threshold
        known = [p for p in ask.prompts if p.hashes]
        spilled = copies = False
        holder = self._sessions.holder(ask, usable, now, threshold)
        own, others = list[Offer](), list[Offer]()
        if holder is None:
            own, others = self._offers(usable, ask, known, now)
            _, new, chosen, _ = self._first(own or others, ask)
        else:
            new, chosen = ask.new(holder.prefixes), holder
        length_class = SHORT if new <= threshold else LONG
        if not own:
            spilled = holder is None
        elif others and chosen.pool == length_class:
            relief = self._relief(length_class, own, others)
            if relief:
                spilled = True
                _, new, chosen, _ = self._first(relief, ask)
        elif chosen.pool == LONG and length_class == SHORT:
            host = self._host_of_copy(ask, chosen, others)
            if host is not None:
                # It is computed as a whole there, as a long request is.
                length_class, copies = LONG, True
                _, new, chosen, _ = host
        late_s = 0.0
        if ask.until < math.inf:
            first_s = chosen.outlook.first_s(now, new, total - new, length_class == SHORT)
            late_s = max(0.0, now + first_s - ask.until) if first_s is not None else 0.0
        why: Why = "copy" if copies else "spill" if spilled else "pool" if others else "expected"
        if holder is not None:
            why = "session"
        elif why in ("pool", "expected") and new < total:
            why = "prefix"
        if not late_s:
            # It will be held there.
            self._sessions.served(ask.session, chosen)
            for p in known:
                chosen.prefixes.add(p)
                p.prompt = None
        work_s = min(chosen.outlook.model.work_s(new, total - new), MOST_WORK_S)
        return Choice(chosen.server, length_class, new, total - new, work_s, spilled, copies, chosen.rank, why, late_s)

    def _offers(
        self, usable: Sequence[PrefillInstance], ask: Ask, known: Sequence[Fingerprint], now: float
    ) -> tuple[list[Offer], list[Offer]]:
        """Costs of the request at the places of these instances (seconds): at home, in the other pool. Of the places of
        a server that hold nothing of the prompt, one without work costs least, and the one of them that has served
        least stands for all: none of them is better in anything."""
        threshold, total = self.config.threshold, max(1, ask.total)
        prefixed = total > threshold
        own: list[Offer] = []
        others: list[Offer] = []
        heads = {p.hashes[0] for p in known}
        head, several = next(iter(heads), 0), len(heads) > 1
        fresh = ask.new(NOTHING) if known else total
        fresh_short = fresh <= threshold
        model: Coefficients | None = None
        step_s = work_s = behind_s = 0.0
        for i in usable:
            pool = i.pool
            free: Place | None = None
            busy: list[Place] = []
            for place in i.places:
                blocks = place.prefixes.blocks
                if not blocks.keys().isdisjoint(heads) if several else head in blocks:
                    new = ask.new(place.prefixes)
                    short = new <= threshold
                    here = place.outlook.model
                    took_s = here.work_s(new, total - new)
                    others_s = BEHIND * took_s
                    cost_s = place.outlook.with_work_s(now, here.step_s, took_s, short) + others_s
                    offer = cost_s, new, place, others_s
                    # What is short only because its history lies there is at home with it.
                    at_home = pool == BOTH or (pool == SHORT) == short or (short and prefixed)
                    (own if at_home else others).append(offer)
                elif place.outlook.free_at > now or place.outstanding:
                    busy.append(place)
                elif free is None or place.served_tokens < free.served_tokens:
                    free = place
            if free is None and not busy:
                continue
            if i.outlook.model is not model:
                # Those that say nothing of their speed share one.
                model = i.outlook.model
                step_s, work_s = model.step_s, model.work_s(fresh, total - fresh)
                behind_s = BEHIND * work_s
            offers = own if pool == BOTH or (pool == SHORT) == fresh_short or (fresh_short and prefixed) else others
            if free is not None:
                offers.append((step_s + work_s + behind_s, fresh, free, behind_s))
                continue
            for place in busy:
                cost_s = place.outlook.with_work_s(now, step_s, work_s, fresh_short) + behind_s
                offers.append((cost_s, fresh, place, behind_s))
        return own, others

    @staticmethod
    def _first(offers: list[Offer], ask: Ask) -> Offer:
        """Where it is answered first; with a deadline that several keep with ease, where that is the least work."""
        if ask.slo_s is not None:
            easy = [o for o in offers if o[0] - o[3] <= EASE * ask.slo_s]
            if easy:
                return min(easy, key=lambda o: (o[1], o[0], *_load(o[2])))
        return _least(offers)

    def _host_of_copy(self, ask: Ask, holder: Place, others: list[Offer]) -> Offer | None:
        """The short-pool place that takes a request which is short only in the long pool, to hold what it shares
        with others from then on; None where it shares nothing yet, or none of them has the time."""
        if len(ask.prompts) != 1:
            return None
        (prompt,) = ask.prompts
        blocks = holder.prefixes.depth(prompt)
        if not self._shared.due(prompt, blocks):
            return None
        hosts = [o for o in others if o[2].pool == SHORT]
        host = _least(hosts) if hosts else None
        if host is None or host[2].outstanding_tokens > self.config.load_unit:
            return None
        self._shared.copied(prompt, blocks)
        return host

    def _relief(self, home: Pool, own: list[Offer], others: list[Offer]) -> list[Offer]:
        """Places of the other pool that may take a request whose ``own`` pool is overloaded."""
        unit = self.config.load_unit
        least = min(o[2].outstanding_tokens for o in own)
        if least <= unit:
            return []
        able = [o for o in others if self._may_spill(home, o[2])]
        idle = [o for o in able if not o[2].outstanding]
        if idle or home == SHORT or least <= FLOOD * unit:
            return idle
        return [o for o in able if o[2].outstanding_tokens * FLOOD <= least]

    def _may_spill(self, home: Pool, to: Place) -> bool:
        if self.config.spill == "auto":
            return home == SHORT or to.outlook.parks
        return self.config.spill in ("both", home)


def _least(offers: list[Offer]) -> Offer:
    """The cheapest, and of several with the least in flight."""
    least = min(offers, key=_cost)[0]
    return min((o for o in offers if o[0] == least), key=lambda o: _load(o[2]))


def _load(p: Place) -> tuple[int, int, int]:
    return p.outstanding_tokens, p.outstanding, p.served_tokens
