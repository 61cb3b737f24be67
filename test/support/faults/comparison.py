"""Comparison of the router with stock MiniLB on the corpus: the same outcome, or a better one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from faults.clients import bounded, exchange
from faults.corpus import ANSWER, ERROR, GONE, REFUSAL, SILENCE, SOFT, Case
from faults.evidence import MARKER, Evidence
from faults.oracle import Seen

RANK = {SILENCE: 0, GONE: 1, ERROR: 2, SOFT: 3, REFUSAL: 4, ANSWER: 4}
"""Rank of each outcome; higher is better. A refusal and an answer have the same rank but are different outcomes."""
TOGETHER = 16
LIMIT_S = 10.0
"""Time after which a case counts as silence."""
IN_USE = "Duplicate request ID"
"""SGLang's refusal of an id that another request uses."""
FIRST = 1_000_000
"""Number of the first case, beyond those of other requests."""


def family(seen: Seen | None) -> str:
    """Return how a case ended; a case that was not sent (None) counts as silence."""
    if seen is None or seen.left:
        return SILENCE
    if seen.status is None or seen.broken:
        return GONE
    if seen.status >= 400:
        return ERROR if seen.status >= 500 else REFUSAL
    return ANSWER if seen.done else SOFT if seen.reason else GONE


@dataclass(frozen=True)
class Compared:
    """Outcome of one case at both routers."""

    case: Case
    ours: Seen
    stock: Seen | None

    @property
    def fine(self) -> bool:
        """Return True if the outcome is the same, better, or as promised."""
        if self.case.promise:
            return family(self.ours) == self.case.promise
        return family(self.ours) == family(self.stock) or self.better

    @property
    def better(self) -> bool:
        """Return True if the outcome is better than stock's."""
        return RANK[family(self.ours)] > RANK[family(self.stock)]

    def __str__(self) -> str:
        return f"{self.case.name}: {_words(self.ours)}; stock: {_words(self.stock)}"


def _words(seen: Seen | None) -> str:
    if seen is None:
        return "not sent"
    return " ".join(filter(None, (family(seen), str(seen.status or ""), (seen.reason or seen.broken)[:100])))


def choose(cases: Sequence[Case], number: int, seed: int) -> list[Case]:
    """Return ``number`` random cases, in their order."""
    some = set(random.Random(seed).sample(range(len(cases)), min(number, len(cases))))
    return [case for i, case in enumerate(cases) if i in some]


async def run(
    port: int, cases: Sequence[Case], say: Callable[[str], None], whole: Callable[[], bool], marked: bool
) -> dict[str, Seen]:
    """Send all cases while the servers are ``whole``. Return the outcomes of the cases sent, by name, in their order.

    ``marked``: send each case with its number in a header. A case met with silence is sent once more, because after
    faults SGLang occasionally loses a handshake between its servers, behind any router. If the second try is refused
    because the servers still have the first one, the outcome of the first try counts.
    """
    room = asyncio.Semaphore(TOGETHER)
    outcomes: dict[str, Seen] = {}

    async def one(i: int, case: Case) -> None:
        async with room:
            if whole():
                seen = outcomes[case.name] = Seen(FIRST + i, "compared", stream=case.stream)
                headers = {MARKER: str(seen.number)} if marked else {}
                await bounded(exchange(port, case.wire(headers), seen), seen, LIMIT_S)
                say(f"{len(outcomes)} of {len(cases)} hostile requests")

    await asyncio.gather(*(one(i, c) for i, c in enumerate(cases)))
    again = [(i, c) for i, c in enumerate(cases) if c.name in outcomes and family(outcomes[c.name]) == SILENCE]
    first = {c.name: outcomes[c.name] for _, c in again}
    await asyncio.gather(*(one(i, c) for i, c in again))
    return outcomes | {name: seen for name, seen in first.items() if IN_USE in (outcomes[name].reason or "")}


def last_sent(cases: Sequence[Case], outcomes: Mapping[str, Seen]) -> list[str]:
    """Return the names of the last cases if sending was cut short, because one of these cases caused the stop."""
    return list(outcomes)[-2 * TOGETHER :] if len(outcomes) < len(cases) else []


def compare(cases: Sequence[Case], ours: Mapping[str, Seen], stock: Mapping[str, Seen]) -> list[Compared]:
    """Return the cases sent to both routers, and those withheld from stock; outcomes by name."""
    return [
        Compared(c, ours[c.name], stock.get(c.name)) for c in cases if c.name in ours and (c.deadly or c.name in stock)
    ]


def own_errors(outcomes: Mapping[str, Seen], evidence: Evidence) -> list[str]:
    """Return the cases answered 5xx although no server did."""
    return [
        f"{name}: {_words(seen)}"
        for name, seen in outcomes.items()
        if family(seen) == ERROR and not any(h.what.startswith("answered 5") for h in evidence.hits(seen.number))
    ]
