"""Closed loops: requests/s and TTFT over the number of clients, per variant."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmark.load import client
from benchmark.load.client import Loop
from benchmark.load.prompts import Prompts
from benchmark.results.bars import CLOSED_BEST, CLOSED_WORST
from benchmark.results.metrics import quantile
from benchmark.results.piece import Figure, Table
from benchmark.results.rounds import in_turns, ratio
from benchmark.rig.variants import FCFS, LAPS
from benchmark.suites.serve.compare import Servers
from benchmark.workloads.named import Workload

CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128)


def run(
    servers: Servers,
    names: Sequence[str],
    workload: Workload,
    prompts: Prompts,
    clients: Sequence[int],
    rounds: int,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
) -> dict[int, dict[str, dict[str, list[float]]]]:
    """clients -> variant -> figure -> one value a round. Raises ConnectionError where a request fails."""
    points: dict[int, dict[str, dict[str, list[float]]]] = {}
    for n in clients:

        def once(i: int, name: str, n: int = n) -> Loop:
            jobs = workload.sample(1000, random.Random(f"{seed} {n} {i}"))
            loop = asyncio.run(client.closed(servers.target(name), prompts.bodies(jobs, seed * 1000 + i), n, seconds))
            if loop.failed or not loop.ttft_s:
                raise ConnectionError(f"{name}: {loop.failed} requests failed with {n} clients")
            return loop

        points[n] = {
            name: {
                "requests_per_s": [loop.rate for loop in loops],
                **{f"p{q}_ms": [1e3 * quantile(loop.ttft_s, q) for loop in loops] for q in (50, 90)},
            }
            for name, loops in in_turns(names, rounds, once, say, f"closed loop of {n}: ").items()
        }
    return points


def report(
    points: dict[int, dict[str, dict[str, list[float]]]], names: Sequence[str], base: str
) -> tuple[list[Table], list[Figure], dict[str, Any]]:
    """Tables, ratios over ``base``, raw figures."""
    tables, compared = [], []
    for key, title in (("requests_per_s", "requests/s"), ("p50_ms", "TTFT P50 (ms)"), ("p90_ms", "TTFT P90 (ms)")):
        rows = [(str(n), *(f"{statistics.median(at[name][key]):.1f}" for name in names)) for n, at in points.items()]
        tables.append(Table(f"Closed loop: {title}", ("clients", *names), rows))
    for name in names:
        rates = {
            n: ratio(at[name]["requests_per_s"], at[base]["requests_per_s"]) for n, at in points.items() if name != base
        }
        bar = CLOSED_WORST if (name, base) == (LAPS, FCFS) else None
        compared += [Figure.of(f"requests/s, {n} clients, {name} / {base}", r, bar) for n, r in rates.items()]
        if bar:
            top = max(r.median for r in rates.values())
            compared.append(Figure.of("requests/s at LAPS's best point", top, CLOSED_BEST))
    return tables, compared, {"points": {str(n): at for n, at in points.items()}}
