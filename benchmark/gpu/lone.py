"""A short request alone: LAPS's overhead where nothing else waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from laps_plan.traffic.job import Job

from benchmark.load import client
from benchmark.results.bars import LONE
from benchmark.results.metrics import quantile
from benchmark.results.piece import Figure, Piece, Table
from benchmark.results.rounds import in_turns
from benchmark.rig.fleet import Fleet
from benchmark.rig.variants import FCFS
from benchmark.serve import slices

REQUESTS, ROUNDS = 20, 21


def lone(fleet: Fleet, names: Sequence[str], seed: int, rounds: int = ROUNDS) -> Piece:
    """Measure, the servers in turns of a few requests. Raises ConnectionError."""

    def once(i: int, name: str) -> list[float]:
        bodies = fleet.prompts.bodies([Job(0.0, slices.SHORT_TOKENS)] * (REQUESTS + 1), seed * 7000 + i)
        return asyncio.run(client.one_by_one(fleet.target(name), bodies))[1:]

    seen = in_turns(names, rounds, once, lambda _: None)
    figures = [
        Figure.of(f"TTFT of a short request alone, {name} / {FCFS}", slices.over(seen[name], seen[FCFS]), LONE)
        for name in names
        if name != FCFS
    ]
    rows: list[Sequence[str]] = [
        (name, *(f"{quantile(slices.flat_ms(of), q):.2f}" for q in (10, 50, 90))) for name, of in seen.items()
    ]
    note = f"TTFT in ms; {slices.SHORT_TOKENS} tokens, one request at a time."
    text = f"{fleet.device.what}; {rounds} rounds of {REQUESTS} requests, the servers in turns."
    table = Table("Alone", ("variant", "P10", "P50", "P90"), rows, note)
    return Piece("lone", "A short request alone", text, seed, [table], figures, data={"ttft_s": seen})
