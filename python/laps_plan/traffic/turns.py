"""Recorded sessions of coding agents: each turn follows the previous answer, after the client's pause."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import chain_conversations, poisson, wrap_conversations
from laps_plan.traffic.traces import FOLDER


class Turn(NamedTuple):
    """One request of a session."""

    new: int
    cached: int
    pause_s: float
    """Time from the first token of the previous answer: the client's own time, and that of the output."""
    output: int = 1
    """Tokens of the answer."""


def jobs(sessions: Iterable[tuple[float, Sequence[Turn]]], span_s: float | None = None) -> list[Job]:
    """Return the requests of sessions that start at these times (seconds), due as if answers took no time. ``span_s``:
    see ``streams.wrap_conversations``; None: sessions are not wrapped."""
    found: list[Job] = []
    for i, (at, turns) in enumerate(sessions):
        for n, turn in enumerate(turns):
            pause_s = turn.pause_s if n else 0.0
            at += pause_s
            found.append(Job(at, turn.new, turn.cached, i, continues_stream=True, pause_s=pause_s, output=turn.output))
    return chain_conversations(found) if span_s is None else wrap_conversations(found, span_s)


@cache
def agents(longest: int, pause_s: float, token_s: float, path: Path = FOLDER / "agents.csv.gz") -> list[list[Turn]]:
    """Return sessions of coding agents. ``longest``, ``pause_s``: prompts (tokens) and pauses are cut to these;
    ``token_s``: time per token of output. Raises OSError."""
    found: dict[str, list[Turn]] = {}
    said: dict[str, int] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            name = row["session"]
            new = min(longest, max(1, int(row["new_tokens"])))
            cached = min(longest - new, int(row["cached_tokens"]))
            pause = min(pause_s, int(row["think_ms"] or 0) / 1e3) + token_s * said.get(name, 0)
            said[name] = int(row["output_tokens"])
            found.setdefault(name, []).append(Turn(new, cached, pause, max(1, said[name])))
    return list(found.values())


def stretches(
    sessions: Sequence[Sequence[Turn]], each: int, rate: float, span_s: float, rng: random.Random
) -> list[tuple[float, Sequence[Turn]]]:
    """Return stretches of ``each`` turns around a random turn of a session, started at Poisson times for ``span_s``:
    about ``rate`` requests per second."""
    places = [(s, i) for s in sessions for i in range(len(s))]
    made = []
    for at in poisson(rate / (each - 1), span_s, rng):
        session, i = rng.choice(places)
        made.append((at, session[max(0, i - each // 2) : i + each // 2 + 1]))
    return made
