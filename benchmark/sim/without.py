"""The rules of the policy, and how each is taken out from outside: by a knob, or by a patch while a simulation runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any

from laps_core.policy import batching, fairness, hold, order, preemption
from laps_core.policy.arrivals import Arrivals, Expected
from laps_core.policy.fairness import Gap, Patience
from laps_core.policy.hold import Window
from laps_core.policy.order import LEAST_WORK, Key, Lone
from laps_core.policy.predict import Sizes
from laps_core.policy.preemption import Preemption
from laps_core.policy.types import Paused, Plan, Waiting

from benchmark.sim.loads import Kind

Patch = Callable[[], AbstractContextManager[None]]


@contextmanager
def _replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr_static(where, name)  # a static method stays one
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def put(where: Any, name: str, value: Any) -> Patch:
    """Another value for an attribute of a module or a class, while the context lasts."""
    return lambda: _replaced(where, name, value)


@dataclass(frozen=True)
class Rule:
    """One rule, and what the policy does without it."""

    name: str
    instead: str
    """In a few words."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    patches: Sequence[Patch] = ()
    deadlines: bool = False
    """True for a rule that does nothing where no request has a deadline."""
    bound: str = ""
    """The promise that needs it, whatever its figures."""
    kind: Kind = "policy"
    alloc: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the router."""

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """The policy without it."""
        with ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch())
            yield


# -- what is done instead


def _by_arrival(w: Waiting, work_s: float, lone_s: Lone, now: float) -> Key:
    return (w.since_s,)


def _late_as_others(w: Waiting, work_s: float, lone_s: Lone, now: float) -> Key:
    return work_s, w.since_s


def fills(
    items: Sequence[Waiting], beside_s: Callable[[Waiting], float], *, budget: int, fixed_s: float, waiting: int,
    left_s: float | None = None,
) -> list[int]:  # fmt: skip
    """In place of ``pack``: in order until the chunk is full, the last one cut."""
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


def _unshared(self: Preemption, now: float, shorts: Sequence[Waiting], longs: Sequence[Waiting], plan: Plan) -> Plan:
    return plan


def _cheap(
    self: Preemption, now: float, shorts: Sequence[Waiting], longs: Sequence[Waiting], plan: Plan, paused: Paused
) -> bool:
    return True


def _whole_chunk(self: Sizes, threshold: int) -> int:
    return self.budget


def _nobody(self: Arrivals, now: float) -> Expected:
    return Expected(0.0, now)


def _never(self: Gap) -> float:
    return math.inf


def _free(self: Window, now: float, idle_s: float, depth: int) -> None:
    pass


LATE_LAST = {**order.ORDERS, LEAST_WORK: _late_as_others}
ARRIVAL = {**order.ORDERS, LEAST_WORK: _by_arrival}

RULES = (
    Rule("two classes", "all are long", {"length_threshold": 1}),
    Rule("least work first", "by arrival", patches=[put(batching, "ORDERS", ARRIVAL)]),
    Rule("guard", "no share for the oldest", {"guard": 0.0}, bound="wait of a long prompt"),
    Rule("packing", "chunks are filled", patches=[put(batching, "pack", fills)]),
    Rule("overtaking", "long prompts preempt none", patches=[put(preemption, "OVERTAKE_DEPTH", 0)]),
    Rule("slices", "whole batches", {"slice_ms": 0.0}, bound="wait of a short request"),
    Rule("gap", "the shortest there is", {"preempt_overhead": 1.0}, bound="share of the long class"),
    Rule("saved-up preemptions", "none are saved", patches=[put(fairness, "SAVED", 1)]),
    Rule("preempting must pay", "whenever the gap allows", patches=[put(Preemption, "pays", _cheap)]),
    Rule(
        "eight gaps at most", "as long as it does not pay", patches=[put(preemption, "PATIENCE", math.inf)],
        bound="wait of a short request",
    ),
    Rule("shared steps", "steps of one class", patches=[put(Preemption, "share", _unshared)]),
    Rule("those still to come", "who waits counts once", patches=[put(batching, "AHEAD", 1.0)]),
    Rule(
        "half a chunk preempts", "a whole one", patches=[put(Sizes, "preempting_budget", _whole_chunk)],
        bound="memory of activations",
    ),
    Rule(
        "each eighth turn by arrival", "never", patches=[put(Patience, "due", False)],
        bound="wait of those too late, or last in their order",
    ),
    Rule("window", "no batch is held", {"wait_window_ms": 0.0}),
    Rule("returning clients", "not waited for", patches=[put(Arrivals, "returning", _nobody)]),
    Rule("following a burst", "not waited for", patches=[put(Arrivals, "following", _nobody)]),
    Rule("credit of holds", "whatever holds cost", patches=[put(Window, "_settle", _free)], bound="cost of holds"),
    Rule("four windows at most", "no limit", patches=[put(hold, "HEAD_MAX", math.inf)], bound="longest hold"),
    Rule("deadlines press", "they wait for the gap", patches=[put(Gap, "presses_s", _never)], deadlines=True),
    Rule("late ones last", "as any other", patches=[put(batching, "ORDERS", LATE_LAST)], deadlines=True),
    Rule("a tenth of the guard if late", "the whole share", patches=[put(fairness, "LATE", 1.0)], deadlines=True),
)  # fmt: skip
