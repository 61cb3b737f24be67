"""What clients see behind the router: the same real servers behind both, the same arrivals in each pair of rounds."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laps_plan.traffic.job import LONG, SHORT, Job
from laps_plan.traffic.streams import poisson

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results import bars
from benchmark.results.metrics import KINDS, quantiles
from benchmark.results.piece import Figure, Piece, Table
from benchmark.results.rounds import in_turns, ratio
from benchmark.rig import model, servers
from benchmark.rig.devices import MODELS
from benchmark.suites.router import BOTH, LAPS, STOCK, routers

PREFILLS = 3
LAPS_PREFILL = ("--enable-laps-scheduler",)
TOKENS = {SHORT: 20, LONG: 5000}
ANSWER_TOKENS = 4
SHORT_PER_S = 4.0
LONG_LOAD = 0.45
"""Share of all prefill servers' time that the long prompts ask for."""
PATIENCE_S = 120.0


def arrivals(seconds: float, long_per_s: float, rng: random.Random) -> list[Job]:
    """Poisson arrivals of both kinds; every prompt is new."""
    rates = {SHORT: SHORT_PER_S, LONG: long_per_s}
    jobs = [Job(at_s, TOKENS[kind]) for kind, rate in rates.items() for at_s in poisson(rate, seconds, rng)]
    return sorted(jobs, key=lambda job: job.at_s)


def figures(answers: list[client.Answer]) -> dict[str, Any]:
    """Of one round."""
    found = {kind: quantiles(answers, kind) for kind in KINDS}
    return {**found, "requests": len(answers), "failed": sum(a.ttft_s is None for a in answers)}


def run(out: Path, rounds: int, seconds: float, laps_prefill: bool, say: Callable[[str], None]) -> Piece:
    """Short P90 TTFT behind both routers. Without ``laps_prefill`` the servers are stock, so that the difference is the
    router's alone. Raises ServerError or ConnectionError."""
    checkpoint = model.make(Path(os.environ.get("LAPS_MODELS", MODELS)))
    env = {"OMP_NUM_THREADS": "1"}
    flags = ["--chunked-prefill-size", "1024", "--max-total-tokens", "65536", "--disable-overlap-schedule"]
    flags += LAPS_PREFILL if laps_prefill else ()
    prefills = [
        servers.prefill(checkpoint, out / "logs" / f"prefill{i}.log", *flags, env=env, name=f"prefill {i}")
        for i in range(PREFILLS)
    ]
    decode = servers.decode(checkpoint, out / "logs" / "decode.log", "--max-total-tokens", "262144", env=env)
    up = routers(prefills, [decode], out)
    targets = {name: Target(servers.HOST, router.port) for name, router in up.items()}
    prompts = Prompts(model.VOCABULARY, 1, TOKENS[LONG], reuse=False, prefill_only=False, answer=ANSWER_TOKENS)
    say("starting the servers")
    with servers.running(*prefills, decode, *up.values()):
        bodies = prompts.bodies([Job(0.0, TOKENS[LONG])] * 6, 0)
        alone_s = statistics.median(asyncio.run(client.one_by_one(targets[STOCK], bodies))[1:])
        # Servers share the cores of this machine: no more than those run at a time.
        long_per_s = LONG_LOAD * min(PREFILLS, len(os.sched_getaffinity(0))) / alone_s

        def once(i: int, name: str) -> dict[str, Any]:
            jobs = arrivals(seconds, long_per_s, random.Random(2 + i))
            load = client.replay(targets[name], jobs, prompts.bodies(jobs, 1 + i), PATIENCE_S)
            return figures(asyncio.run(load))

        seen = in_turns(BOTH, rounds, once, say)
    settings = {"prefill": PREFILLS, "prefill_flags": flags, "long_prompt_alone_s": alone_s, "long_per_s": long_per_s}
    return piece(seen, settings)


def piece(seen: dict[str, list[dict[str, Any]]], settings: dict[str, Any]) -> Piece:
    """For the report."""
    rows = []
    for name, rounds in seen.items():
        cells = [f"{statistics.median(r[k][q] for r in rounds):.0f}" for k in KINDS for q in ("p50_ms", "p90_ms")]
        rows.append((name, *cells, str(sum(r["failed"] for r in rounds))))
    p90 = {name: [r[SHORT]["p90_ms"] for r in rounds] for name, rounds in seen.items()}
    title = "short P90 TTFT behind the router, laps / stock"
    return Piece(
        name="router-real",
        title="Short chats among long prompts behind the router",
        text=f"{settings['prefill']} real prefill servers and a decode server; the same arrivals behind both routers, "
        "in turns. Medians over rounds.",
        seed=1,
        tables=[Table("TTFT (ms)", ("router", "short P50", "short P90", "long P50", "long P90", "failed"), rows)],
        figures=[Figure.of(title, ratio(p90[LAPS], p90[STOCK]), bars.BEHIND_ROUTER)],
        data={**settings, "short_per_s": SHORT_PER_S, "rounds": seen},
    )
