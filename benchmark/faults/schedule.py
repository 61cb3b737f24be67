"""What is done, to whom and when, from a seed alone: faults of servers in lanes, and what each client is about."""

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
"""Faults of one server, and how long they last (seconds). Of a kill: until it is started again. A decode server notices
by two missed beats, here 2 s apart, that a prefill server has died; one that is back before is taken for the old one,
and all that the two are asked for hangs. No real server is back so soon."""
DECODE_FAULTS = {**SERVER_FAULTS, "hang": (2.0, 8.0)}
"""Also streams that stop in the middle, for ever, at a server that is well otherwise."""
ROUTER_FAULTS = {"descriptors": (2.0, 5.0), "halves": (2.0, 5.0), "flush": (0.0, 0.0)}
"""Its descriptors used up; as many half-sent requests as it takes at once; its route that empties all caches."""
LANES = {PREFILL: SERVER_FAULTS, DECODE: DECODE_FAULTS, ROUTER: ROUTER_FAULTS}
"""One fault at a time in each lane, so at most one server of a role is out."""
GAP_S = {PREFILL: (1.0, 4.0), DECODE: (1.0, 4.0), ROUTER: (4.0, 12.0)}
"""Rest before a fault."""

DEEDS = {
    PLAIN: 71, "leave": 7, "half": 2, "abort": 4, "twin": 3, "batch": 3, "stall": 2, "pipeline": 2, "keyless": 3,
    HOSTILE: 3,
}  # fmt: skip
"""What clients are about, and how often: a request and nothing else; going away at a random moment; a body that is sent
in part; an abort by id; two requests under one id; several prompts in one request; a stream that is not read for a
while, or at all; more requests on a connection that has an answer under way; aborts of others' requests without the
key; a hostile body."""
CLASSES = (*DECODE_FAULTS, *ROUTER_FAULTS, *(d for d in DEEDS if d != PLAIN))


@dataclass(frozen=True)
class Fault:
    """One fault of a lane."""

    kind: str
    lane: str
    target: int
    """Which server of the role (counted modulo their number)."""
    length_s: float
    gap_s: float
    """Rest before it."""


@dataclass(frozen=True)
class Deed:
    """One thing a client does."""

    kind: str
    prompt: int
    """Which prompt (counted modulo their number)."""
    stream: bool
    openai: bool
    """By the openai client where it knows the route."""
    seed: int
    """Of whatever else it leaves to chance."""


def faults(seed: int, lane: str, only: str | None = None) -> Iterator[Fault]:
    """Without end: every fault of the lane once in random order, and again. Empty where ``only`` is none of them."""
    rng = random.Random(f"{seed} {lane}")
    kinds = [k for k in LANES[lane] if only in (None, k)]
    while kinds:
        for kind in rng.sample(kinds, len(kinds)):
            yield Fault(kind, lane, rng.randrange(1 << 16), rng.uniform(*LANES[lane][kind]), rng.uniform(*GAP_S[lane]))


def deeds(seed: int, only: str | None = None) -> Iterator[Deed]:
    """Without end. ``only`` one of the deeds: every second one is that, the others are plain."""
    rng = random.Random(f"{seed} deeds")
    weights = dict(DEEDS)
    if only in DEEDS and only != PLAIN:
        weights = {PLAIN: 1, only: 1}
    elif only is not None:
        weights = {PLAIN: 1}
    kinds, shares = list(weights), list(weights.values())
    while True:
        (kind,) = rng.choices(kinds, shares)
        yield Deed(kind, rng.randrange(1 << 16), rng.random() < 0.5, rng.random() < 0.6, rng.getrandbits(32))


def covered(inflicted: Collection[tuple[str, str]], only: str | None = None) -> bool:
    """Whether every fault of every lane has happened; ``inflicted``: (lane, kind)."""
    return all((lane, kind) in inflicted for lane, kinds in LANES.items() for kind in kinds if only in (None, kind))
