"""A request as the router sends it: a server is chosen, and it is recorded that the request goes there."""

from __future__ import annotations

from collections.abc import Collection

from laps_core.pools.choice import Choice, Pools
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.prefixes import Ask


def send(pools: Pools, ask: Ask, avoid: Collection[PrefillInstance] = ()) -> Choice | None:
    """Return the choice for ``ask``, recorded unless the router would refuse it as too late; without a lease."""
    choice = pools.choose(ask, avoid)
    if choice is not None and not choice.late_s:
        pools.sends(ask, choice)
    return choice
