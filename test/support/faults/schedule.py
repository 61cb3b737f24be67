"""Schedule made from a seed alone: faults of servers in lanes, and actions of clients."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

PREFILL, DECODE, ROUTER = "prefill", "decode", "router"
PLAIN, HOSTILE = "plain", "hostile"
SERVER_FAULTS = {
    "kill": (4.5, 6.0),
    "stop": (1.0, 12.0),
    "refuse": (1.0, 5.0),
    "reset": (1.0, 4.0),
    "silent": (2.0, 12.0),
    "storm": (1.0, 5.0),
    "pause": (0.3, 3.0),
}
"""Faults of one server, and the range of their duration (seconds). A kill lasts until the restart. A decode server
notices a dead prefill server after two missed heartbeats, 2 s apart here. If the prefill server restarted sooner, all
requests of the pair would hang; no real server restarts that fast."""
DECODE_FAULTS = {**SERVER_FAULTS, "hang": (2.0, 8.0)}
"""Faults of a decode server: also streams that stop forever in the middle, while the server is healthy otherwise."""
ROUTER_FAULTS = {"descriptors": (2.0, 5.0), "halves": (2.0, 5.0), "flush": (0.0, 0.0)}
"""Faults of the router: descriptors used up; more half-sent requests than it admits; a flush of all caches through its
route."""
LANES = {PREFILL: SERVER_FAULTS, DECODE: DECODE_FAULTS, ROUTER: ROUTER_FAULTS}
"""Faults by lane. A lane has one fault at a time, so at most one server of a role is down."""
GAP_S = {PREFILL: (1.0, 4.0), DECODE: (1.0, 4.0), ROUTER: (4.0, 12.0)}
"""Shortest and longest pause before a fault, by lane (seconds)."""

ACTIONS = {
    PLAIN: 71, "leave": 7, "half": 2, "abort": 4, "twin": 3, "batch": 3, "stall": 2, "pipeline": 2, "keyless": 3,
    HOSTILE: 3,
}  # fmt: skip
"""Actions of clients, and their weights: a plain request; disconnecting at a random moment; sending part of a body;
aborting by id; two requests under one id; several prompts in one request; not reading a stream for a while, or at all;
further requests on a connection that has an answer under way; aborting others' requests without the key; a hostile
body."""
KINDS = (*DECODE_FAULTS, *ROUTER_FAULTS, *(d for d in ACTIONS if d != PLAIN))


@dataclass(frozen=True)
class Fault:
    """One fault of a lane."""

    kind: str
    lane: str
    target: int
    """Server of the role (counted modulo the number of servers)."""
    length_s: float
    gap_s: float
    """Pause before the fault."""


@dataclass(frozen=True)
class Action:
    """One action of a client."""

    kind: str
    prompt: int
    """Prompt (counted modulo the number of prompts)."""
    stream: bool
    openai: bool
    """True to use the openai client if it supports the route."""
    seed: int
    """Seed of the action's other random choices."""


def faults(seed: int, lane: str, only: str | None = None) -> Iterator[Fault]:
    """Yield faults without end: rounds of every fault of the lane in random order. With ``only`` yield that fault
    alone, or nothing if the lane lacks it."""
    rng = random.Random(f"{seed} {lane}")
    kinds = [k for k in LANES[lane] if only in (None, k)]
    while kinds:
        for kind in rng.sample(kinds, len(kinds)):
            yield Fault(kind, lane, rng.randrange(1 << 16), rng.uniform(*LANES[lane][kind]), rng.uniform(*GAP_S[lane]))


def actions(seed: int, only: str | None = None) -> Iterator[Action]:
    """Yield random actions without end. With ``only`` half of the actions are that action, the rest are plain."""
    rng = random.Random(f"{seed} deeds")
    weights = dict(ACTIONS)
    if only in ACTIONS and only != PLAIN:
        weights = {PLAIN: 1, only: 1}
    elif only is not None:
        weights = {PLAIN: 1}
    kinds, shares = list(weights), list(weights.values())
    while True:
        (kind,) = rng.choices(kinds, shares)
        yield Action(kind, rng.randrange(1 << 16), rng.random() < 0.5, rng.random() < 0.6, rng.getrandbits(32))


def all_faults_inflicted(inflicted: Collection[tuple[str, str]], only: str | None = None) -> bool:
    """Return True if every fault of every lane has happened; ``inflicted``: (lane, kind)."""
    return all((lane, kind) in inflicted for lane, kinds in LANES.items() for kind in kinds if only in (None, kind))
