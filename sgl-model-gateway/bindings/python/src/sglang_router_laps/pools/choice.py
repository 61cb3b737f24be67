"""Which servers get a request: a prefill server out of the two pools, and a decode server."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from laps_core.pools.controller import Move
from laps_core.pools.pressure import POOLS, Pool

from ..config import AllocConfig
from ..prompts.prefixes import Ask, SharedPrefixes
from ..servers.instances import Clock, Instance, PrefillInstance, open_to

PREFIX_LOAD_FACTOR = 1.5
"""The instance that holds the prefix is passed over when its load exceeds this many times its pool's mean: as much as
computing a prefix again costs a pool that is evenly loaded."""
FLOOD = 8
"""A pool with this many times ``load_unit`` in flight everywhere need not find an idle instance to spill long
requests to: one with as many times less in flight does."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and what it is taken for."""

    instance: PrefillInstance
    length_class: Pool
    new_tokens: int
    """Tokens expected to be computed there (>= 1)."""
    spilled: bool = False
    """It went to the other pool because its own is overloaded or has nobody healthy."""
    copies: bool = False
    """It went to the short pool so that the prefix it shares with others is held there from now on."""


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
    ) -> None:
        """``servers``: (url, bootstrap port) of each prefill server; ``decoders``: URLs. Raises ConfigError when they
        do not fit ``config``."""
        config.check_instances(len(servers))
        self.config = config
        n_short = config.initial_short or max(config.n_min, len(servers) // 2)
        self.instances = [
            PrefillInstance(url, port, "short" if i < n_short else "long", clock=clock)
            for i, (url, port) in enumerate(servers)
        ]
        self.decoders = [Instance(url, "decode", clock) for url in decoders]
        self._shared = SharedPrefixes()

    def members(self, pool: Pool) -> list[PrefillInstance]:
        """All instances of ``pool``, healthy or not."""
        return [i for i in self.instances if i.pool == pool]

    def by_url(self, url: str) -> PrefillInstance:
        """The instance at ``url``."""
        return next(i for i in self.instances if i.url == url)

    def apply(self, move: Move) -> None:
        """Carry out a move of the controller."""
        self.by_url(move.name).pool = move.target

    def forget_prefixes(self) -> None:
        """The servers' caches are being flushed."""
        self._shared.clear()
        for i in self.instances:
            i.prefixes.clear()

    def choose_pair(self, ask: Ask, tried: Tried) -> tuple[Choice, Instance] | None:
        """A prefill and a decode server for a request; None while a role has nobody healthy.

        Rather two servers that had no part in a failure, then a pair that is new, then any.
        """
        if not open_to(self.decoders, ()):
            return None
        shunned = tried.servers.union(*tried.ways)
        avoid = [p for p in self.instances if p in shunned]
        if all(p in shunned for p in self.instances if p.healthy):
            avoid = [p for p in self.instances if not self._new(p, tried)]
        choice = self.choose(ask, avoid)
        if choice is None:
            return None
        usable = open_to(self._new(choice.instance, tried) or self.decoders, shunned)
        return choice, min(usable, key=lambda i: (i.outstanding, i.served))

    def _new(self, prefiller: PrefillInstance, tried: Tried) -> list[Instance]:
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
        """The instance for a request; None when nobody is healthy.

        Short is what leaves at most the threshold to compute. It goes to the short pool if that holds there; a
        request that is short only where its history lies goes to where its history lies, unless others share that
        history: then one of them takes it to the short pool. Instances in ``avoid`` are taken only when there is no
        other.
        """
        usable = open_to(self.instances, avoid)
        if not usable:
            return None
        total = ask.total
        known = [p for p in ask.prompts if p.hashes]
        new = {i: ask.new(i.prefixes) for i in usable} if known else {}
        length_class, home = self._classify(total, new)
        candidates = [i for i in usable if i.pool == home]
        spilled = copies = False
        if not candidates:
            candidates, spilled = usable, True
        elif home == length_class:
            # What is short only where its history lies would be long elsewhere.
            relief = self._relief(home, candidates, usable)
            if relief:
                candidates, spilled = relief, True
        else:
            host = self._host_of_copy(ask, usable, new)
            if host is not None:
                # It is computed as a whole there, as a long request is.
                candidates, length_class, copies = [host], "long", True
        chosen = self._prefer(candidates, new)
        for p in known:
            chosen.prefixes.add(p)
            p.prompt = None
        return Choice(chosen, length_class, new.get(chosen, max(1, total)), spilled, copies)

    def _classify(self, total: int, new: dict[PrefillInstance, int]) -> tuple[Pool, Pool]:
        """(class, pool) of a request."""
        threshold = self.config.threshold
        if total <= threshold:
            return "short", "short"
        fewest: dict[Pool, int] = dict.fromkeys(POOLS, total)
        for i, tokens in new.items():
            fewest[i.pool] = min(fewest[i.pool], tokens)
        if fewest["short"] <= threshold:
            return "short", "short"
        return ("short" if fewest["long"] <= threshold else "long"), "long"

    def _host_of_copy(
        self, ask: Ask, usable: list[PrefillInstance], new: dict[PrefillInstance, int]
    ) -> PrefillInstance | None:
        """The short-pool instance that takes a request which is short only in the long pool, to hold what it shares
        with others from then on; None where it shares nothing yet, or none of them has the time."""
        if len(ask.prompts) != 1:
            return None
        (prompt,) = ask.prompts
        holder = min((i for i in usable if i.pool == "long"), key=lambda i: new[i])
        blocks = holder.prefixes.depth(prompt)
        if not self._shared.due(prompt, blocks):
            return None
        host = min((i for i in usable if i.pool == "short"), key=lambda i: (new[i], _load(i)), default=None)
        if host is None or host.outstanding_tokens > self.config.load_unit:
            return None
        self._shared.copied(prompt, blocks)
        return host

    def _relief(self, home: Pool, own: list[PrefillInstance], usable: list[PrefillInstance]) -> list[PrefillInstance]:
        """Instances of the other pool that may take a request whose ``own`` pool is overloaded."""
        least = min(i.outstanding_tokens for i in own)
        if least <= self.config.load_unit:
            return []
        others = [i for i in usable if i.pool != home and self._may_spill(home, i)]
        idle = [i for i in others if not i.outstanding]
        if idle or home == "short" or least <= FLOOD * self.config.load_unit:
            return idle
        return [i for i in others if i.outstanding_tokens * FLOOD <= least]

    def _may_spill(self, home: Pool, to: PrefillInstance) -> bool:
        if self.config.spill == "auto":
            return home == "short" or to.parks
        return self.config.spill in ("both", home)

    def _prefer(self, candidates: list[PrefillInstance], new: dict[PrefillInstance, int]) -> PrefillInstance:
        least = min(candidates, key=_load)
        if not new:
            return least
        holder = min(candidates, key=lambda i: (new[i], i.outstanding_tokens))
        if new[holder] >= new[least]:
            return least
        mean = sum(i.outstanding_tokens for i in candidates) / len(candidates)
        # The threshold's worth of slack keeps a nearly idle pool from scattering conversations.
        limit = PREFIX_LOAD_FACTOR * mean + self.config.threshold
        # Nor is a long prefix computed again to be rid of a short wait.
        sooner = holder.outstanding_tokens + new[holder] <= least.outstanding_tokens + new[least]
        return holder if sooner or holder.outstanding_tokens <= limit else least


def _load(i: PrefillInstance) -> tuple[int, int, int]:
    return i.outstanding_tokens, i.outstanding, i.served_tokens
