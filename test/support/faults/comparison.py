"""Comparison of the router with stock MiniLB on the corpus: the same outcome, or a better one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from faults.clients import exchange, run_with_limit
from faults.corpus import ANSWER, ERROR, GONE, REFUSAL, SILENCE, SOFT, Case
from faults.evidence import MARKER, Evidence
from faults.oracle import RequestRecord

RANK = {SILENCE: 0, GONE: 1, ERROR: 2, SOFT: 3, REFUSAL: 4, ANSWER: 4}
"""Rank of each outcome; higher is better. A refusal and an answer have the same rank but are different outcomes."""
MAX_CONCURRENT = 16
LIMIT_S = 10.0
"""Time after which a case counts as silence."""
IN_USE = "Duplicate request ID"
"""SGLang's refusal of an id that another request uses."""
FIRST_NUMBER = 1_000_000
"""Number of the first case, beyond those of other requests."""


def classify(record: RequestRecord | None) -> str:
    """Return how a case ended; a case that was not sent (None) counts as silence."""
    if record is None or record.left:
        return SILENCE
    if record.status is None or record.broken:
        return GONE
    if record.status >= 400:
        return ERROR if record.status >= 500 else REFUSAL
    return ANSWER if record.done else SOFT if record.reason else GONE


@dataclass(frozen=True)
class Comparison:
    """Outcome of one case at both routers."""

    case: Case
    ours: RequestRecord
    stock: RequestRecord | None

    @property
    def acceptable(self) -> bool:
        """Return True if the outcome is the same, better, or as promised."""
        if self.case.promise:
            return classify(self.ours) == self.case.promise
        return classify(self.ours) == classify(self.stock) or self.better

    @property
    def better(self) -> bool:
        """Return True if the outcome is better than stock's."""
        return RANK[classify(self.ours)] > RANK[classify(self.stock)]

    def __str__(self) -> str:
        return f"{self.case.name}: {_describe(self.ours)}; stock: {_describe(self.stock)}"


def _describe(record: RequestRecord | None) -> str:
    if record is None:
        return "not sent"
    return " ".join(filter(None, (classify(record), str(record.status or ""), (record.reason or record.broken)[:100])))


def choose_cases(cases: Sequence[Case], number: int, seed: int) -> list[Case]:
    """Return ``number`` random cases, in their order."""
    some = set(random.Random(seed).sample(range(len(cases)), min(number, len(cases))))
    return [case for i, case in enumerate(cases) if i in some]


async def send_cases(
    port: int, cases: Sequence[Case], say: Callable[[str], None], servers_alive: Callable[[], bool], marked: bool
) -> dict[str, RequestRecord]:
    """Send all cases while ``servers_alive``. Return the outcomes of the cases sent, by name, in their order.

    ``marked``: send each case with its number in a header. A case met with silence is sent once more, because after
    faults SGLang occasionally loses a handshake between its servers, behind any router. If the second try is refused
    because the servers still have the first one, the outcome of the first try counts.
    """
    room = asyncio.Semaphore(MAX_CONCURRENT)
    outcomes: dict[str, RequestRecord] = {}

    async def one(i: int, case: Case) -> None:
        async with room:
            if servers_alive():
                record = outcomes[case.name] = RequestRecord(FIRST_NUMBER + i, "compared", stream=case.stream)
                headers = {MARKER: str(record.number)} if marked else {}
                await run_with_limit(exchange(port, case.wire(headers), record), record, LIMIT_S)
                say(f"{len(outcomes)} of {len(cases)} hostile requests")

    await asyncio.gather(*(one(i, c) for i, c in enumerate(cases)))
    again = [(i, c) for i, c in enumerate(cases) if c.name in outcomes and classify(outcomes[c.name]) == SILENCE]
    first = {c.name: outcomes[c.name] for _, c in again}
    await asyncio.gather(*(one(i, c) for i, c in again))
    return outcomes | {name: record for name, record in first.items() if IN_USE in (outcomes[name].reason or "")}


def last_sent(cases: Sequence[Case], outcomes: Mapping[str, RequestRecord]) -> list[str]:
    """Return the names of the last cases if sending was cut short, because one of these cases caused the stop."""
    return list(outcomes)[-2 * MAX_CONCURRENT :] if len(outcomes) < len(cases) else []


def compare(
    cases: Sequence[Case], ours: Mapping[str, RequestRecord], stock: Mapping[str, RequestRecord]
) -> list[Comparison]:
    """Return the cases sent to both routers, and those withheld from stock; outcomes by name."""
    return [
        Comparison(c, ours[c.name], stock.get(c.name))
        for c in cases
        if c.name in ours and (c.deadly or c.name in stock)
    ]


def find_own_errors(outcomes: Mapping[str, RequestRecord], evidence: Evidence) -> list[str]:
    """Return the cases answered 5xx although no server did."""
    return [
        f"{name}: {_describe(record)}"
        for name, record in outcomes.items()
        if classify(record) == ERROR and not any(h.what.startswith("answered 5") for h in evidence.hits(record.number))
    ]
