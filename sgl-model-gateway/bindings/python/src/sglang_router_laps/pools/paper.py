"""The router of the LAPS paper, as a baseline: class by the whole prompt, server with the fewest requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from laps_core.length import classify
from laps_core.pools.pressure import BOTH

from ..config import AllocConfig
from ..prompts.prefixes import Ask
from ..servers.instances import PrefillInstance, open_to
from .choice import MOST_WORK_S, Choice, Pools, Why


class PaperPools(Pools):
    """Pools that ignore prefixes, history and predicted times."""

    def choose(self, ask: Ask, avoid: Collection[PrefillInstance] = ()) -> Choice | None:
        """See Pools."""
        usable, total = open_to(self.instances, avoid), max(1, ask.total)
        if not usable:
            return None
        length_class = classify(total, self.config.threshold)
        own = [i for i in usable if i.pool in (length_class, BOTH)]
        places = [place for i in own or usable for place in i.places]
        chosen = min(places, key=lambda p: (p.outstanding, p.outstanding_tokens, p.served_tokens))
        work_s = min(chosen.outlook.model.work_s(total, 0), MOST_WORK_S)
        why: Why = "pool" if own else "spill"
        return Choice(chosen.server, length_class, total, 0, work_s, not own, rank=chosen.rank, why=why)


def pools(servers: Any, config: AllocConfig, **more: Any) -> Pools:
    """Return the pools that ``config`` asks for; other arguments as for ``Pools``."""
    return (Pools if config.preset is None else PaperPools)(servers, config, **more)
