"""Recorded sessions: each turn follows the answer before it, after the pause that the client made."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import poisson
from laps_plan.traffic.traces import FOLDER


class Turn(NamedTuple):
    """One request of a session."""

    new: int
    cached: int
    pause_s: float
    """From the answer before it: the client's own time, and that of the output."""


class Turns:
    """Sessions that begin at given times (a stream, see streams.Stream). May be read once."""

    follows = True

    def __init__(self, sessions: Sequence[tuple[float, Sequence[Turn]]]) -> None:
        """``sessions``: (begin in seconds, turns), by begin."""
        self._sessions = sessions
        self._left = [iter(turns[1:]) for _, turns in sessions]
        self._number = len(sessions)

    def arrivals(self) -> Iterator[Job]:
        """See Stream."""
        for i, (at, turns) in enumerate(self._sessions):
            yield Job(at, turns[0].new, turns[0].cached, i, goes_on=True, number=i)

    def answered(self, now: float, job: Job) -> Job | None:
        """See Stream."""
        following = next(self._left[job.stream], None)
        if following is None:
            return None
        self._number += 1
        at = now + following.pause_s
        return Job(at, following.new, following.cached, job.stream, goes_on=True, number=self._number - 1)


@cache
def agents(longest: int, pause_s: float, token_s: float, path: Path = FOLDER / "agents.csv.gz") -> list[list[Turn]]:
    """Sessions of coding agents. ``longest``, ``pause_s``: prompts (tokens) and pauses are cut to these; ``token_s``:
    of a token of output. Raises OSError."""
    found: dict[str, list[Turn]] = {}
    said: dict[str, int] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            name = row["session"]
            new = min(longest, max(1, int(row["new_tokens"])))
            cached = min(longest - new, int(row["cached_tokens"]))
            pause = min(pause_s, int(row["think_ms"] or 0) / 1e3) + token_s * said.get(name, 0)
            said[name] = int(row["output_tokens"])
            found.setdefault(name, []).append(Turn(new, cached, pause))
    return list(found.values())


def stretches(sessions: Sequence[Sequence[Turn]], each: int, rate: float, span_s: float, seed: str) -> Turns:
    """``each`` turns around a random one of a session, begun at Poisson times for ``span_s``: about ``rate`` requests
    per second."""
    rng = random.Random(seed)
    places = [(s, i) for s in sessions for i in range(len(s))]
    made = []
    for at in poisson(rate / (each - 1), span_s, rng):
        session, i = rng.choice(places)
        made.append((at, session[max(0, i - each // 2) : i + each // 2 + 1]))
    return Turns(made)
