"""Two servers for each request: a prefill server out of the pools, and a decode server."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..servers.instances import Instance, PrefillInstance, open_to
from .ask import Ask
from .choice import Choice, Pools


class Pairs:
    """All servers by role."""

    def __init__(self, pools: Pools, decoders: Sequence[Instance]) -> None:
        self.pools = pools
        self.decoders = decoders

    def choose(self, ask: Ask, avoid: Collection[Instance]) -> tuple[Choice, Instance] | None:
        """A pair for a request, with servers in ``avoid`` only where there is no other; None while one is missing."""
        usable = open_to(self.decoders, avoid)
        if not usable:
            return None
        choice = self.pools.choose(ask, [i for i in avoid if isinstance(i, PrefillInstance)])
        return None if choice is None else (choice, min(usable, key=lambda i: (i.outstanding, i.served)))

    def elsewhere(self, avoid: Collection[Instance]) -> bool:
        """Whether there are servers of both roles that are not in ``avoid``."""
        return all(any(i.usable and i not in avoid for i in role) for role in (self.pools.instances, self.decoders))

    def another(self, avoid: Collection[Instance]) -> bool:
        """Whether there is a server of either role that is not in ``avoid``: with it the pair is another one.

        One that is on trial has no room now, but soon.
        """
        return any(i.healthy and i not in avoid for i in (*self.pools.instances, *self.decoders))

    def missing(self) -> str:
        """The role that has nobody healthy."""
        return "decode" if any(i.healthy for i in self.pools.instances) else "prefill"
