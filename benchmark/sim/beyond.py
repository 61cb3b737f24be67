"""Rules beyond those of one server's policy: for memory that runs out, for ranks that plan together, for the router."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from laps_core.group import slices as group_slices
from laps_core.group.planner import GroupPlanner
from laps_core.group.slices import Slices
from laps_core.policy.memory import MemoryHold
from laps_core.pools import choice, offers
from laps_core.pools.choice import Pools
from laps_core.pools.controller import PoolController
from laps_core.pools.prefixes import Ask

from benchmark.sim.without import Rule, put


def _returns(value: Any) -> Callable[..., Any]:
    """In place of a method: whatever it is asked."""
    return lambda *_, **__: value


def _everything(self: Ask, *_: Any) -> int:
    return max(1, self.total)


def _fewest(found: Sequence[Any], ask: Ask) -> Any:
    return min(found, key=lambda offer: (offer[2].outstanding_tokens, offer[2].served_tokens))


BEYOND = (
    Rule("memory for who is owed it", "none is kept", kind="memory",
         patches=[put(MemoryHold, "stand_back", _returns(()))], bound="start of a long request"),
    Rule("slices of all ranks", "whole steps", {"slice_ms": 0.0}, kind="group"),
    Rule("short steps first", "one step of all", patches=[put(Slices, "shorts_first", _returns(False))], kind="group"),
    Rule("saved-up preemptions of ranks", "one", patches=[put(group_slices, "SAVED", 1.0)], kind="group"),
    Rule("guard of ranks", "no share for the oldest", {"guard": 0.0}, kind="group", bound="wait of a long prompt"),
    Rule("those still to come, of ranks", "who waits counts once", kind="group",
         patches=[put(GroupPlanner, "_learn_arrivals", _returns(None)), put(group_slices, "AHEAD", 1.0)]),
    Rule("first answer", "fewest tokens in flight", kind="router",
         patches=[put(choice, "first", _fewest)]),
    Rule("cached history", "prompts count whole", patches=[put(Ask, "new", _everything)], kind="router"),
    Rule("delay of others", "its own answer alone", patches=[put(offers, "BEHIND", 0.0)], kind="router"),
    Rule("pools where they pay", "one pool", patches=[put(PoolController, "step", _returns(()))], kind="router"),
    Rule("copies of prefixes", "none", patches=[put(Pools, "_host_of_copy", _returns(None))], kind="router"),
    Rule("spill", "own pool only", alloc={"spill": "off"}, kind="router"),
    Rule("spill of long ones in a flood", "to idle servers", patches=[put(offers, "FLOOD", math.inf)], kind="router"),
)  # fmt: skip
