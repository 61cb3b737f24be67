"""The rules of the policy, and ways to take each out from outside: by a knob, or by a patch during a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from laps_core.group import slices as group_slices
from laps_core.group.planner import GroupPlanner
from laps_core.group.slices import Slices
from laps_core.paper import PaperPacer, PaperWindow
from laps_core.policy import batching, exchange, fairness, hold, order, preemption
from laps_core.policy.fairness import Gap
from laps_core.policy.hold import Window
from laps_core.policy.memory import MemoryHold
from laps_core.policy.order import LEAST_WORK, Key
from laps_core.policy.pacer import Pacer
from laps_core.policy.predict import Sizes
from laps_core.policy.preemption import Preemption
from laps_core.policy.types import Plan, Waiting
from laps_core.pools import choice, offers
from laps_core.pools.controller import PoolController
from laps_core.pools.prefixes import Ask

from benchmark.sim.loads import Kind

Patch = AbstractContextManager[Any]
patch: Callable[[Any, str, Any], Patch] = mock.patch.object
"""Context manager that replaces an attribute of a module or a class while it lasts."""


@dataclass(frozen=True)
class Rule:
    """One rule, and what the policy does without it."""

    name: str
    instead: str
    """Behaviour of the policy without the rule, in a few words."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    patches: Sequence[Patch] = ()
    deadlines: bool = False
    """True for a rule that does nothing if no request has a deadline."""
    bound: str = ""
    """Promise that needs the rule, even if no figure does."""
    kind: Kind = "policy"
    alloc: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the router."""

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """Run the enclosed simulation without the rule."""
        with ExitStack() as stack:
            for one in self.patches:
                stack.enter_context(one)
            yield


# -- replacements of rules


def _returns(value: Any) -> Callable[..., Any]:
    """Return a method that always returns ``value``."""
    return lambda *_, **__: value


def _by_arrival(w: Waiting, work_s: float, lone_s: float, now: float) -> Key:
    return (w.since_s,)


def fills(items: Sequence[Waiting], sizes: Sizes, *, budget: int, **_: Any) -> list[int]:
    """Pick requests in order until the chunk is full and cut the last one, in place of ``pack``."""
    picked: list[int] = []
    room, slot_taken = budget, False
    for i, item in enumerate(items):
        if room <= 0:
            break
        cut = item.started or item.tokens > room
        if cut and slot_taken:
            continue
        picked.append(i)
        room -= min(item.tokens, room)
        slot_taken |= cut
    return picked


def _unshared(self: Preemption, now: float, picked: Any, longs: Any, plan: Plan, *_: Any, **__: Any) -> Plan:
    return plan


def _whole_chunk(self: Sizes, threshold: int) -> int:
    return self.budget


def _no_burst(self: Window, now: float, n: int = 1, blind_since: float | None = None) -> None:
    self._returning.add(n, now if blind_since is None else blind_since, now)


ARRIVAL = {**order.ORDERS, LEAST_WORK: _by_arrival}

RULES = (
    Rule("two classes", "all are long", {"length_threshold": 1}),
    Rule("least work first", "by arrival", patches=[patch(batching, "ORDERS", ARRIVAL)]),
    Rule("guard", "no share for the oldest", {"guard": 0.0}, bound="wait of a long prompt"),
    Rule("packing", "chunks are filled", patches=[patch(batching, "pack", fills)]),
    Rule("overtaking", "long prompts preempt none", patches=[patch(preemption, "DEPTH", 0)]),
    Rule("slices", "whole batches", {"slice_ms": 0.0}, bound="wait of a short request"),
    Rule("gap", "the shortest there is", {"preempt_overhead": 1.0}, bound="share of the long class"),
    Rule("longer gaps for many", "as long as for one", patches=[patch(Gap, "set_paying_longs", _returns(None))]),
    Rule("saved-up preemptions", "none are saved", patches=[patch(fairness, "SAVED", 1)]),
    Rule(
        "preempting must pay", "whenever the gap allows",
        patches=[patch(Preemption, "should_preempt", _returns(True))],
    ),
    Rule("shared steps", "steps of one class", patches=[patch(Preemption, "share", _unshared)]),
    Rule(
        "later arrivals", "each waiting request counts once",
        patches=[patch(module, "AHEAD", 1.0) for module in (exchange, preemption, hold)],
    ),
    Rule(
        "half a chunk preempts", "a whole one", patches=[patch(Sizes, "preempting_budget", _whole_chunk)],
        bound="memory of activations",
    ),
    Rule(
        "late decisions", "as soon as a batch runs",
        patches=[patch(Pacer, "decision_time_s", PaperPacer.decision_time_s)],
    ),
    Rule("window", "no batch is held", {"wait_window_ms": 0.0}),
    Rule("crowds", "one batch", patches=[patch(Window, "most_at_once", PaperWindow.most_at_once)]),
    Rule("bursts", "clients due back are waited for alone", patches=[patch(Window, "record_arrivals", _no_burst)]),
    Rule(
        "deadlines press", "they wait for the gap",
        patches=[patch(Gap, "opens_for_deadline_at", _returns(math.inf))], deadlines=True,
    ),
    Rule(
        "most prompts in time", "least work first", patches=[patch(order, "in_time", _returns(()))], deadlines=True
    ),
    Rule("a tenth of the guard if late", "the whole share", patches=[patch(fairness, "LATE", 1.0)], deadlines=True),
)  # fmt: skip

# -- rules beyond one server's policy: for memory that runs out, for ranks that plan together, for the router. Copies of
# shared prefixes are not among them, because no two simulated sessions share a prefix.


def _as_chosen(_: Any, __: Any, choice: Any, **___: Any) -> Any:
    return choice


def _everything(self: Ask, *_: Any) -> int:
    return max(1, self.total)


def _fewest(found: Sequence[Any], ask: Ask) -> Any:
    return min(found, key=lambda offer: (offer[2].outstanding_tokens, offer[2].served_tokens))


BEYOND = (
    Rule("memory hold", "no hold", kind="memory",
         patches=[patch(MemoryHold, "choose_held_classes", _returns(()))], bound="start of a long request"),
    Rule("slices of all ranks", "whole steps", {"slice_ms": 0.0}, kind="group"),
    Rule("short steps first", "one step of all", kind="group",
         patches=[patch(Slices, "shorts_first", _as_chosen)]),
    Rule("saved-up preemptions of ranks", "one", patches=[patch(group_slices, "SAVED", 1.0)], kind="group"),
    Rule("guard of ranks", "no share for the oldest", {"guard": 0.0}, kind="group", bound="wait of a long prompt"),
    Rule("later arrivals, of ranks", "each waiting request counts once", kind="group",
         patches=[patch(GroupPlanner, "_learn_arrivals", _returns(None)), patch(group_slices, "AHEAD", 1.0)]),
    Rule("first answer", "fewest tokens in flight", kind="router",
         patches=[patch(choice, "choose_offer", _fewest)]),
    Rule("cached history", "prompts count whole", patches=[patch(Ask, "new", _everything)], kind="router"),
    Rule("delay of others", "its own answer alone", patches=[patch(offers, "BEHIND", 0.0)], kind="router"),
    Rule("pools where they pay", "one pool", patches=[patch(PoolController, "step", _returns(()))], kind="router"),
    Rule("spill", "own pool only", alloc={"spill": "off"}, kind="divided"),
    Rule("spill of long ones in a flood", "to idle servers", kind="divided",
         patches=[patch(offers, "FLOOD", math.inf)]),
)  # fmt: skip
ALL = (*RULES, *BEYOND)
