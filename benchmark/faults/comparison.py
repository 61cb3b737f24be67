"""The corpus at the router and at stock MiniLB: the same outcome, or a better one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmark.faults import corpus
from benchmark.faults.corpus import ANSWER, ERROR, GONE, REFUSAL, SILENCE, SOFT, Case, Outcome
from benchmark.faults.evidence import MARKER, Evidence

RANK = {SILENCE: 0, GONE: 1, ERROR: 2, SOFT: 3, REFUSAL: 4, ANSWER: 4}
"""Higher is better; two different ones of the same rank are not the same."""
TOGETHER = 6
NOT_SENT = Outcome(SILENCE, None, "not sent")
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


async def run(
    port: int, cases: Sequence[Case], say: Callable[[str], None], whole: Callable[[], bool], marked: bool
) -> list[Outcome | None]:
    """Send all while the servers are ``whole``; what is not sent has no outcome.

    ``marked``: each with its number, where servers get to see the headers.
    """
    room, done = asyncio.Semaphore(TOGETHER), 0

    async def one(i: int, case: Case) -> Outcome | None:
        nonlocal done
        async with room:
            if not whole():
                return None
            outcome = await corpus.bounded(port, case, {MARKER: str(FIRST + i)} if marked else None)
        done += 1
        say(f"{done} of {len(cases)} hostile requests")
        return outcome

    return list(await asyncio.gather(*(one(i, c) for i, c in enumerate(cases))))


def last_sent(cases: Sequence[Case], outcomes: Sequence[Outcome | None]) -> list[str]:
    """Where sending was cut short: names of the last ones sent, one of which did it."""
    sent = [c.name for c, o in zip(cases, outcomes, strict=True) if o]
    return sent[-2 * TOGETHER :] if len(sent) < len(cases) else []


def compare(
    cases: Sequence[Case], ours: Sequence[Outcome | None], stock: Mapping[str, Outcome | None]
) -> list[Compared]:
    """Those that were sent to both, or that stock is not to have; ``stock``: by name."""
    found = []
    for case, mine in zip(cases, ours, strict=True):
        theirs = stock.get(case.name) or (NOT_SENT if case.deadly else None)
        if mine and theirs:
            found.append(Compared(case, mine, theirs))
    return found


def own_errors(cases: Sequence[Case], outcomes: Sequence[Outcome | None], evidence: Evidence) -> list[str]:
    """Cases answered 5xx though no server said so."""
    found = []
    for i, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
        theirs = any(h.what.startswith("answered 5") for h in evidence.hits(FIRST + i))
        if outcome and outcome.family == ERROR and not theirs:
            found.append(f"{case.name}: {_words(outcome)}")
    return found
