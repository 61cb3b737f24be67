"""Routers in front of servers: none, a plain balancer, or the LAPS router with its pools."""

from __future__ import annotations

from collections.abc import Sequence

from laps_core.pools.config import AllocConfig
from laps_core.pools.demand import BusySplit
from laps_core.pools.paper import controller, pools
from laps_core.pools.prefixes import EMPTY, TOKENS_PER_BLOCK, Ask, Fingerprint
from laps_core.pools.pressure import InstanceSignals
from laps_core.protocol import ByClass, Load

from laps_plan.sim.engine import Events, Server
from laps_plan.sim.request import Request

MEMORY = 1 << 24
"""Capacity of a server's prefix cache as reported to the router (tokens). Simulated caches never evict."""


class Plain:
    """Servers with prefix caches of their own, which hold the histories served there; a subclass picks the server."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self.moves: list[tuple[float, str, str]] = []
        self._held: list[dict[int, int]] = [{} for _ in servers]
        self._begun: set[int] = set()

    def send(self, now: float, request: Request) -> None:
        i = self._pick(now, request)
        self._arrive(i, request)
        self.servers[i].send(now, request)

    def answered(self, now: float, request: Request) -> None:
        """See engine.Fleet."""

    def _pick(self, now: float, request: Request) -> int:
        raise NotImplementedError

    def _arrive(self, i: int, request: Request) -> None:
        """Count as cached the part of the history that server ``i`` holds; the rest is computed again. The history of a
        session's first request is cached on any server."""
        if request.session < 0:
            return
        held = self._held[i]
        if request.session not in self._begun:
            self._begun.add(request.session)
            held[request.session] = request.cached
        cached = min(held.get(request.session, 0), request.cached)
        request.left += request.cached - cached
        request.cached = request.history = cached
        # Sub-agents continue from an earlier turn; the longer history of other turns stays cached.
        held[request.session] = max(held.get(request.session, 0), request.prompt)


class Single(Plain):
    """One server."""

    def _pick(self, now: float, request: Request) -> int:
        return 0


class RoundRobin(Plain):
    """Plain data parallelism: servers in turn, regardless of their requests in flight."""

    _turn = -1

    def _pick(self, now: float, request: Request) -> int:
        self._turn = (self._turn + 1) % len(self.servers)
        return self._turn


class LeastLoad(Plain):
    """Policy of SGLang's router: the holder of the history while loads are even, else the fewest requests in flight."""

    UNEVEN = 32, 1.5
    """Loads are uneven when they differ by more than this many requests and this factor."""

    def __init__(self, servers: Sequence[Server]) -> None:
        super().__init__(servers)
        self._load = [0] * len(servers)
        self._turn = 0
        self._where: dict[int, int] = {}

    def _pick(self, now: float, request: Request) -> int:
        load = self._load
        low, high = min(load), max(load)
        more, factor = self.UNEVEN
        holder = self._where.get(request.session)
        if holder is None or (high - low > more and high > factor * low):
            # Servers of equal load take turns.
            n = len(load)
            self._turn = (self._turn + 1) % n
            holder = load.index(low, self._turn) if low in load[self._turn :] else load.index(low)
        if request.session >= 0:
            self._where[request.session] = holder
        load[holder] += 1
        request.lease = holder
        return holder

    def answered(self, now: float, request: Request) -> None:
        self._load[request.lease] -= 1


class Pooled(Plain):
    """The LAPS router: its classification, pools and controller, unchanged, on simulated time.

    The router knows a history in a shared cache (no session) to the token. It recognises histories of sessions by its
    own prefix index, as in service.
    """

    def __init__(self, servers: Sequence[Server], config: AllocConfig, events: Events) -> None:
        super().__init__(servers)
        self.now = 0.0
        self.pools = pools([(s.name, None) for s in servers], config, clock=lambda: self.now)
        for server, instance in zip(servers, self.pools.instances, strict=True):
            pacer = getattr(server.scheduler, "pacer", None)
            instance.outlook.parks = pacer is not None
            instance.outlook.own_model = pacer and pacer.model.coefficients
            instance.set_cache_size(MEMORY)
        self._controller = controller(config, self.now)
        self._busy_splits = [BusySplit() for _ in servers]
        self._index = {instance.url: i for i, instance in enumerate(self.pools.instances)}
        self._sample_s = config.sample_s
        self._events = events
        events.at(self._sample_s, self._beat, None)

    def _pick(self, now: float, request: Request) -> int:
        self.now = now
        tokens, prompt = request.prompt, []
        if request.session >= 0:
            prompt = [_fingerprint(request)]
        if request.session not in self._begun and self.pools.config.preset is None:
            # This history is in every server's cache.
            tokens -= request.cached
        ask = Ask(tokens, prompt)
        choice = self.pools.choose(ask)
        if choice is None:
            raise RuntimeError("no healthy server")
        self.pools.record_choice(ask, choice)
        request.lease = choice.lease()
        request.lease.__enter__()
        return self._index[choice.instance.url]

    def answered(self, now: float, request: Request) -> None:
        self.now = now
        request.lease.end()

    def _beat(self, now: float, _: None) -> None:
        """Run one step of the control loop."""
        self.now = now
        for move in self._controller.step(now, [self._signals(now, i) for i in range(len(self.servers))]):
            self.pools.apply(move)
            self.moves.append((now, move.name, move.target))
        self._events.at(now + self._sample_s, self._beat, None)

    def _signals(self, now: float, i: int) -> InstanceSignals:
        server, instance = self.servers[i], self.pools.instances[i]
        pacer, outlook = getattr(server.scheduler, "pacer", None), instance.outlook
        busy_share = server.meter.share(now) if server.meter is not None else 0.0
        busy = self._busy_splits[i].since(
            now, busy_share, ByClass(**server.spent) if pacer is not None else None, outlook
        )
        return InstanceSignals(
            name=instance.url,
            pool=instance.pool,
            load=Load(
                backlog_tokens=float(server.scheduler.waiting_tokens),
                slo_deviation=pacer.slo.deviation(now) if pacer is not None else 0.0,
                busy_share=busy_share,
            ),
            outstanding=instance.outstanding_tokens,
            busy=busy,
            arrived=outlook.arrivals.since(now),
            waiting=outlook.waiting(now),
            parks=outlook.parks,
        )


def _fingerprint(request: Request) -> Fingerprint:
    """Return the fingerprint of a conversation: blocks of its own; each turn has those of the turn before, and more."""
    blocks = request.prompt // TOKENS_PER_BLOCK
    if not blocks:
        return EMPTY
    return Fingerprint(tuple(hash((request.session, i)) for i in range(blocks)), TOKENS_PER_BLOCK / request.prompt)
