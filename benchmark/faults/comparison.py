"""The corpus at the router and at stock MiniLB: the same outcome, or a better one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark.faults import corpus
from benchmark.faults.corpus import ANSWER, ERROR, GONE, REFUSAL, SILENCE, SOFT, Case, Outcome
from benchmark.faults.evidence import MARKER, Evidence

RANK = {SILENCE: 0, GONE: 1, ERROR: 2, SOFT: 3, REFUSAL: 4, ANSWER: 4}
"""Higher is better; two different ones of the same rank are not the same."""
TOGETHER = 6
FIRST = 1_000_000
"""Number of the first case: beyond those of other requests."""


@dataclass(frozen=True)
class Compared:
    """One case at both."""

    case: Case
    ours: Outcome
    stock: Outcome

    @property
    def fine(self) -> bool:
        """The same, better, or what is promised."""
        if self.case.promise:
            return self.ours.family == self.case.promise
        return self.ours.family == self.stock.family or RANK[self.ours.family] > RANK[self.stock.family]

    @property
    def better(self) -> bool:
        """Better than stock."""
        return RANK[self.ours.family] > RANK[self.stock.family]

    def __str__(self) -> str:
        return f"{self.case.name}: {_words(self.ours)}; stock: {_words(self.stock)}"


def _words(outcome: Outcome) -> str:
    return " ".join(filter(None, (outcome.family, str(outcome.status or ""), (outcome.reason or outcome.broken)[:100])))


def choose(cases: Sequence[Case], number: int, seed: int) -> list[Case]:
    """So many of them at random, in their order."""
    some = set(random.Random(seed).sample(range(len(cases)), min(number, len(cases))))
    return [case for i, case in enumerate(cases) if i in some]


async def run(port: int, cases: Sequence[Case], say: Callable[[str], None], marked: bool) -> list[Outcome]:
    """Send all; ``marked``: each with its number, where servers get to see the headers."""
    room, done = asyncio.Semaphore(TOGETHER), 0

    async def one(i: int, case: Case) -> Outcome:
        nonlocal done
        async with room:
            outcome = await corpus.bounded(port, case, {MARKER: str(FIRST + i)} if marked else None)
        done += 1
        say(f"{done} of {len(cases)} hostile requests")
        return outcome

    return list(await asyncio.gather(*(one(i, c) for i, c in enumerate(cases))))


def own_errors(cases: Sequence[Case], outcomes: Sequence[Outcome], evidence: Evidence) -> list[str]:
    """Cases answered 5xx though no server said so."""
    found = []
    for i, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
        theirs = any(h.what.startswith("answered 5") for h in evidence.hits(FIRST + i))
        if outcome.family == ERROR and not theirs:
            found.append(f"{case.name}: {_words(outcome)}")
    return found
