"""Data-parallel attention ranks that plan together, against SGLang's policies on each rank: real schedulers, emulated.

A prefill server has one scheduler process per rank, on an emulated group of eight H200 with DeepSeek-V3. Rates are
those of the unscaled device. `mix`: 95% LMSYS lengths and 5% of 1,024 to 8,192 tokens, each sent to the rank with the
fewest tokens in flight. `agents`: sessions of coding agents. Each turn follows the answer before it and goes to the
rank that has its history. The servers run in turns. The simulator runs the same arrivals.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laps_core.config import LapsConfig
from laps_plan.profile import Profile
from laps_plan.traffic import turns
from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.lengths import lmsys, mix, uniform

from benchmark.fidelity.compare import MEAN, SLOWDOWN, TOKENS, Accuracy, Round, Simulator, drawn, measure
from benchmark.load import Homes, Prompts, SessionPrompts
from benchmark.results import Bar, Command, Namespace, Parser, Piece, bars, take_turns
from benchmark.rig import LAPS, ON, REPO, SPF, Device, Fleet, Variant, checkpoints, devices, flush, get_json
from benchmark.sim.loads import RANKS_LONGEST, THINK_S, TOKEN_S, TURNS

PATIENCE_S = 120.0
KEYS = ("short P90", MEAN, SLOWDOWN, "long P90", TOKENS)
MORE = 10
"""Number of sessions drawn, over the number needed on average."""


@dataclass(frozen=True)
class Load:
    """A named load. Rates are those of the unscaled device (requests/s): 70% of what four saturated ranks serve with
    fcfs."""

    name: str
    what: str
    rate: float
    slow: float
    """Slowdown of the device: makes its steps long beside what four schedulers and the tiny model take on two cores."""
    chunk: int
    """New tokens of a stock rank's batch. Of 512 to 8,192, it has the best mean TTFT, simulated at that rate."""
    longest: int
    """Longest prompt (tokens)."""
    sessions: bool
    """True if turns follow answers and go to the rank that has their history."""
    make: Callable[[float, float, str], list[Job]]
    """Function from rate, span (seconds) and seed to the unscaled jobs."""
    bars: tuple[float, float, float]
    """Largest ratios of LAPS to the best stock policy in short P90, mean TTFT and mean slowdown."""

    @property
    def piece(self) -> str:
        """Return the name of the load's piece in the report."""
        return "groups" if self.name == "mix" else f"groups-{self.name}"

    def jobs(self, rate: float, slow: float, span_s: float, seed: str) -> list[Job]:
        """Return the jobs of a round. Device and clients are ``slow`` times as slow; ``span_s``: duration after that
        scaling (seconds)."""
        made = self.make(rate, span_s / slow, seed)
        return [replace(job, at_s=slow * job.at_s, pause_s=slow * job.pause_s) for job in made]


def mixed(rate: float, span_s: float, seed: str) -> list[Job]:
    return drawn(mix(lmsys(), uniform(1024, 8192), 0.05), rate, span_s, f"mix/{seed}")


def agents(rate: float, span_s: float, seed: str) -> list[Job]:
    """Return the turns of coding agents in a span that wraps around: all sessions are in progress, and their histories
    are in the cache. The number of turns follows the rate, because a round has so few sessions that chance would double
    or halve its load."""
    rng = random.Random(f"agents/{seed}")
    begun: list[tuple[float, Sequence[turns.Turn]]] = []
    drawn = turns.stretches(turns.agents(RANKS_LONGEST, THINK_S, TOKEN_S), TURNS, rate, MORE * span_s, rng)
    for _, session in drawn:
        if sum(len(s) for _, s in begun) < rate * span_s:
            begun.append((rng.uniform(0.0, span_s), session))
    return turns.jobs(begun, span_s)


LOADS = {
    load.name: load
    for load in (
        Load(
            "mix", "95% LMSYS lengths and 5% of 1,024 to 8,192 tokens",
            rate=110.0, slow=10.0, chunk=1024, longest=8192, sessions=False, make=mixed,
            bars=(0.90, 0.83, 0.86),
        ),
        Load(
            "agents", "Turns of coding agents, each after the answer before it, on histories of up to 128k tokens",
            rate=1.33, slow=3.0, chunk=4096, longest=RANKS_LONGEST, sessions=True, make=agents,
            bars=(0.40, 0.58, 0.36),
        ),
    )
}  # fmt: skip
PROFILE, RANKS = "h200-deepseek-v3-dp8", 4
CHUNK = 8192
"""Most new tokens of a rank's batch."""
CONTEXT = 131_072 + 1024
POOL = 1_500_000
"""KV tokens kept by a rank: those of running sessions, and of some finished ones."""
LAYERS = 2
"""Layers of the tiny model if a rank keeps POOL tokens: one dense layer, one with experts."""
_YARN = {**checkpoints.DEEPSEEK["rope_parameters"], "original_max_position_embeddings": -(-CONTEXT // 4)}
LONG = (
    "--context-length", str(CONTEXT), "--max-total-tokens", str(POOL), "--json-model-override-args",
    json.dumps({"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT, "rope_parameters": _YARN}),
)  # fmt: skip
"""Arguments of servers whose prompts are longer than the tiny model's own context."""


def device_of(load: Load) -> Device:
    made = devices.emulated(f"{PROFILE},slow={load.slow:g}")
    if load.sessions:
        made = made.with_prefixes()
    # SGLang needs a core for each rank, one of the cores that this process may use.
    usable = sorted(os.sched_getaffinity(0))
    env = {**made.env, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(usable[i % len(usable)]) for i in range(RANKS))}
    return replace(
        made,
        args=(*made.args, *(LONG if load.sessions else ())),
        env=env,
        checkpoint=lambda: checkpoints.make(devices.MODELS, "deepseek3", checkpoints.DEEPSEEK3),
        start_s=600.0,
        sleeps=False,
    )


def knobs(slow: float) -> dict[str, float]:
    """Return LAPS's knobs for a device that is ``slow`` times as slow: slices last ``slow`` times as long."""
    return {"slice_ms": slow * LapsConfig().slice_ms}


def servers_of(load: Load, ranks: int, slow: float) -> list[Variant]:
    """Return stock's best policy for this load, and LAPS. SGLang divides the chunk by the number of ranks."""
    group = (
        *("--tp-size", str(ranks), "--dp-size", str(ranks), "--enable-dp-attention"),
        *("--load-balance-method", "total_tokens", "--disable-overlap-schedule"),
        # By default SGLang reserves memory for a large chunk, more than this machine has. No batch here is as large.
        *("--mem-fraction-static", "0.5"),
    )
    chunks = {SPF: load.chunk, LAPS: CHUNK}
    own = {SPF: ("--schedule-policy", SPF), LAPS: (ON, "--laps-config", json.dumps(knobs(slow)))}
    return [Variant(n, (*group, *own[n], "--chunked-prefill-size", str(ranks * chunks[n]))) for n in chunks]


def options(p: Parser) -> None:
    p.add_argument("--workload", choices=list(LOADS), default="mix", help="(mix)")


def run(args: Namespace) -> Piece:
    load = LOADS[args.workload]
    slow = load.slow
    args.out = args.out or REPO / "out" / load.piece
    profile = Profile.load(PROFILE).with_ranks(RANKS).stretched(slow)
    device, found = device_of(load), servers_of(load, RANKS, slow)
    prompts = (SessionPrompts if load.sessions else Prompts)(device.vocabulary, args.seed, load.longest, load.sessions)
    rounds = [load.jobs(load.rate, slow, args.seconds, f"{args.seed}/{i}") for i in range(args.rounds)]
    told: dict[str, list[dict[str, Any]]] = {}
    # One server at a time: each has as many schedulers as there are ranks.
    with Fleet(device, found, prompts, args.out, args.say, together=False) as fleet:

        def once(i: int, name: str) -> Round:
            target, seed = fleet.target(name), args.seed + i
            flush(target)
            # The client chooses ranks (``Homes``), because SGLang's controller uses old loads of ranks: one rank would
            # get several times as many requests as another, and different requests on each server.
            answered = measure(fleet, name, rounds[i], seed, slow * PATIENCE_S, Homes(RANKS))
            told[name] = [get_json(target, path) or {} for path in ("/laps_status", "/server_info")]
            return answered

        seen = take_turns([v.name for v in found], args.rounds, once, args.say)
    text = (
        f"{RANKS} scheduler processes, {device.what}. {load.what}; {load.rate:g} requests/s of the unscaled device, "
        f"{args.rounds} rounds of {args.seconds:g} s."
    )
    states = {name: info.get("internal_states", []) for name, (_, info) in told.items()}
    data = {
        "groups": [rank["group"] for rank in told[LAPS][0].get("ranks", [])],
        "emulator": {name: [state.get("emulated") for state in of] for name, of in states.items()},
    }
    return piece(load, simulator(load, profile, slow).compare(rounds, seen, args.seed), text, args.seed, data)


def simulator(load: Load, profile: Profile, slow: float = 1.0) -> Simulator:
    """Return the simulator of these servers. ``slow``: factor by which the profile's steps are stretched."""
    return Simulator(profile, CHUNK, knobs(slow), {SPF: load.chunk}, overlap=False)


def piece(load: Load, seen: Accuracy, text: str, seed: int, data: dict[str, Any]) -> Piece:
    """Return the piece with a table and ratios of all rounds."""
    judged = dict(zip(KEYS, (*map(Bar, load.bars), bars.NO_MORE, bars.EMULATED_RATE), strict=True))
    ratios = [seen.measured.figure(f"{key}, {LAPS} / {SPF}", LAPS, SPF, (key,), bar) for key, bar in judged.items()]
    ratios += seen.ratios("{key}, {policy}: simulated / emulated", dict.fromkeys(KEYS, bars.EMULATED))
    note = f"TTFT in ms of the stretched device, emulated / simulated; short: up to {THRESHOLD} new tokens."
    title = "Groups of ranks" if load.name == "mix" else f"Groups of ranks: {load.name}"
    raw = {"seen": seen.measured.rounds, "simulated": seen.simulated.rounds}
    table = seen.table("Groups", keys=KEYS, note=note)
    return Piece(load.piece, title, text, seed, [table], ratios, data={**raw, **data})


COMMAND = Command("./run bench groups", __doc__, run, options, rounds=1, seed=1, seconds=60.0, every=True)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
