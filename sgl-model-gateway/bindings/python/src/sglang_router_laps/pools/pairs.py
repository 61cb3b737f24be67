"""Two servers for each request: a prefill server out of the pools, and a decode server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..prompts.ask import Ask
from ..servers.instances import Instance, PrefillInstance, open_to
from .choice import Choice, Pools


@dataclass(slots=True)
class Tried:
    """Where a request has been in vain."""

    servers: set[Instance] = field(default_factory=set)
    """These failed it."""
    ways: set[tuple[PrefillInstance, Instance]] = field(default_factory=set)
    """Between these two the KV could not be handed over: either may be the one to leave."""

    @property
    def shunned(self) -> set[Instance]:
        """All that had a part in it."""
        return self.servers.union(*self.ways)

    def holds(self, prefiller: PrefillInstance, decoder: Instance) -> bool:
        """Whether this pair is no other than one of them."""
        return prefiller in self.servers or decoder in self.servers or (prefiller, decoder) in self.ways


class Pairs:
    """All servers by role."""

    def __init__(self, pools: Pools, decoders: Sequence[Instance]) -> None:
        self.pools = pools
        self.decoders = decoders

    def choose(self, ask: Ask, tried: Tried) -> tuple[Choice, Instance] | None:
        """A pair for a request; None while a role has nobody healthy.

        Rather two servers that had no part in a failure, then a pair that is new, then any.
        """
        if not open_to(self.decoders, ()):
            return None
        shunned, prefills = tried.shunned, self.pools.instances
        if all(p in shunned for p in prefills if p.healthy):
            choice = self.pools.choose(ask, [p for p in prefills if not self._new(p, tried)])
        else:
            choice = self.pools.choose(ask, [p for p in prefills if p in shunned])
        if choice is None:
            return None
        usable = open_to(self._new(choice.instance, tried) or self.decoders, shunned)
        return choice, min(usable, key=lambda i: (i.outstanding, i.served))

    def _new(self, prefiller: PrefillInstance, tried: Tried) -> list[Instance]:
        """Healthy decode servers that make a new pair with ``prefiller``."""
        return [d for d in self.decoders if d.healthy and not tried.holds(prefiller, d)]

    def left(self, tried: Tried, *, now: bool) -> bool:
        """Whether there is a new pair; ``now``: with room at once. A server on trial has none now, but soon."""
        return any(
            (d.usable and p.usable if now else p.healthy) for p in self.pools.instances for d in self._new(p, tried)
        )

    def missing(self) -> str:
        """The role that has nobody healthy."""
        return "decode" if any(i.healthy for i in self.pools.instances) else "prefill"
