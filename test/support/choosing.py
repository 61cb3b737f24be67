"""Choose a server for a request and record the choice, as the router does when it sends a request."""

from __future__ import annotations

from collections.abc import Collection

from laps_core.pools.choice import Choice, Pools
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.prefixes import Ask


def choose_and_record(pools: Pools, ask: Ask, avoid: Collection[PrefillInstance] = ()) -> Choice | None:
    """Choose a server for ``ask`` without a lease; record the choice unless the router would refuse it as too late."""
    choice = pools.choose(ask, avoid)
    if choice is not None and not choice.late_s:
        pools.record_choice(ask, choice)
    return choice
