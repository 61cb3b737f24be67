"""Random workloads on data-parallel ranks and on servers behind a router, simulated on random devices.

    python -m benchmark.sim.anything_fleet [--workloads 100]

Ranks: LAPS's joint plan is compared with SGLang's policies on each rank. Router: LAPS servers behind the LAPS router
are compared with stock servers behind the gateway's policies, and with the same LAPS servers behind these policies. The
best of these is chosen in hindsight, for each figure of each workload. Half of the routed workloads are sessions, whose
histories are cached on the servers that served them.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import product
from typing import Any

from laps_plan.profile import Profile
from laps_plan.sim.metrics import RANK_CHUNK
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes
from laps_plan.traffic.streams import chain_conversations

from benchmark.results import Namespace, Piece
from benchmark.rig import FCFS, SPF, STOCK
from benchmark.sim.anything import (
    FIGURES,
    LOADS,
    add_ratios,
    arrivals,
    at_rate,
    command,
    figures,
    lengths,
    over_best,
    prompts,
    run_all,
)
from benchmark.sim.loads import CHUNK, capacity
from benchmark.sim.rules import PROFILES

GROUPS = ("h200-deepseek-v3-dp8", "h200-qwen3-235b-a22b-dp8")
RANKS = 8
GATEWAY = ("least-load", "round-robin")
STOCK_RANKS = tuple(product(STOCK, (512 * RANKS, 2048 * RANKS, RANK_CHUNK * RANKS)))
STOCK_SERVERS = tuple(product((FCFS, SPF), (2048, CHUNK)))
LONGEST = 16_000
"""Longest prompt of a routed workload, and longest history of its sessions (tokens)."""
LATEST = 20
"""Number of open sessions."""
BOTH = dict.fromkeys(FIGURES, "best of the gateway's policies")


def on_ranks(seed: int) -> dict[str, Any]:
    """Return a summary of a random workload on a group of ranks, and the ratios of LAPS to the stock figures."""
    rng = random.Random(f"ranks {seed}")
    profile, load, draw = Profile.load(rng.choice(GROUPS)), rng.choice(LOADS), lengths(rng)
    jobs = prompts(rng, draw, rng.choice((800, 1600)))
    most = max(capacity(jobs, profile, chunk) for _, chunk in STOCK_RANKS)
    jobs = at_rate(jobs, load * most)
    mine = figures("laps", RANK_CHUNK, profile, jobs, overlap=False)
    stock = {one: figures(*one, profile, jobs, overlap=False) for one in STOCK_RANKS}
    return {"seed": seed, "profile": profile.name, "load": load, **over_best(mine, stock)}


def behind_router(seed: int) -> dict[str, Any]:
    """Return a summary of a random workload behind a router, and the ratios of LAPS to the stock figures; ``routers``:
    those of the LAPS router to the gateway's policies in front of the same LAPS servers."""
    rng = random.Random(f"router {seed}")
    profile, load, draw = Profile.load(rng.choice(PROFILES)), rng.choice(LOADS), lengths(rng)
    servers, turns = rng.choice((2, 3, 4, 8)), rng.choice((1, 1, 4, 12))
    n = servers * rng.choice((60, 120))
    jobs = prompts(rng, draw, n) if turns == 1 else sessions(rng, draw, n, turns)
    jobs = [replace(job, new=min(job.new, LONGEST), cached=min(job.cached, LONGEST)) for job in jobs]
    jobs = chain_conversations(at_rate(jobs, load * servers * capacity(jobs, profile)))

    def run(policy: str, chunk: int, router: str) -> list[float]:
        return figures(policy, chunk, profile, jobs, servers=servers, router=router)

    mine = run("laps", CHUNK, "pools")
    stock = {
        (policy, chunk, router): run(policy, chunk, router) for policy, chunk in STOCK_SERVERS for router in GATEWAY
    }
    others = {(router,): run("laps", CHUNK, router) for router in GATEWAY}
    about = {"seed": seed, "profile": profile.name, "load": load, "servers": servers, "turns": turns}
    return {**about, **over_best(mine, stock), "routers": over_best(mine, others, BOTH)}


def sessions(rng: random.Random, draw: Sizes, requests: int, turns: int) -> list[Job]:
    """Return the turns of sessions of so many turns on average; each turn continues one of the latest sessions."""
    jobs, histories = list[Job](), list[int]()
    for at_s in arrivals(rng, rng.choice((1, 1, 4, 20)), requests):
        latest = range(max(0, len(histories) - LATEST), len(histories))
        i = rng.choice(latest) if latest and rng.random() < 1.0 - 1.0 / turns else len(histories)
        if i == len(histories):
            histories.append(0)
        new = draw(rng)
        jobs.append(Job(at_s, new, histories[i], stream=i, continues_stream=True))
        histories[i] += new + rng.randrange(10, 500)
    return jobs


def measure(args: Namespace) -> Piece:
    ranks, routed = run_all(on_ranks, args), run_all(behind_router, args)
    text = (
        f"{len(ranks)} random workloads on eight ranks with data-parallel attention (DeepSeek-V3, Qwen3-235B-A22B) and "
        f"{len(routed)} on 2, 3, 4 or 8 servers behind a router (Qwen3-8B, 32B or 30B-A3B). LAPS is the same in all; "
        "each figure of each workload has the best rival, chosen in hindsight. Below 1: LAPS is better."
    )
    piece = Piece("sim-anything-fleet", "Workloads that nobody has chosen, ranks and router", text, args.seed)
    add_ratios(piece, "Ranks that plan together, over SGLang's policies", ranks, FIGURES, "ranks: ")
    add_ratios(piece, "LAPS servers and router, over SGLang's", routed, FIGURES, "router and servers: ")
    add_ratios(piece, "Router alone: all servers run LAPS", [one["routers"] for one in routed], BOTH, "router: ")
    piece.data = {"ranks": ranks, "routed": routed}
    return piece


COMMAND = command("anything_fleet", __doc__, measure, 100)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
