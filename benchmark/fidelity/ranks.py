"""Data-parallel attention ranks that plan together, against SGLang's policies on each rank: real schedulers, emulated.

A prefill server with one scheduler process per rank, on an emulated group of eight H200 with DeepSeek-V3. Loads, at
rates given for the unscaled device: `mix`, 95% LMSYS lengths and 5% of 1,024 to 8,192 tokens, sent to the rank with
the fewest tokens in flight; `agents`, sessions of coding agents, whose turns follow their answers and go where their
history is. The servers run in turns. The simulator runs the same arrivals.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from laps_plan.profile import Profile
from laps_plan.sim import variants
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.streams import Trace

from benchmark.fidelity.compare import MEAN, SLOWDOWN, TOKENS, Accuracy, Round, Simulate, measure
from benchmark.fidelity.groups import CHUNK, LOADS, PROFILE, Load, device_of, knobs, servers_of
from benchmark.load.prompts import Prompts
from benchmark.load.sessions import Homes, SessionPrompts
from benchmark.results import bars
from benchmark.results.bars import Bar
from benchmark.results.piece import Figure, Parser, Piece, positive
from benchmark.results.rounds import in_turns
from benchmark.rig.fleet import Fleet, flush, get_json
from benchmark.rig.model import REPO
from benchmark.rig.progress import Progress
from benchmark.rig.variants import LAPS, SPF
from benchmark.sim.groups import play

PATIENCE_S = 120.0
KEYS = ("short P90", MEAN, SLOWDOWN, "long P90", TOKENS)


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--seconds", type=positive, default=60.0, help="duration of a round's load (60)")
    p.add_argument("--workload", choices=list(LOADS), default="mix", help="(mix)")
    p.add_argument("--ranks", type=int, default=4, help="data-parallel attention ranks (4)")
    slow, rate = (", ".join(f"{n} {getattr(x, key):g}" for n, x in LOADS.items()) for key in ("slow", "rate"))
    p.add_argument("--slow", type=positive, help=f"slowdown of the emulated device ({slow})")
    p.add_argument("--rate", type=positive, help=f"requests/s of the unscaled device ({rate})")


def run(args: argparse.Namespace) -> Piece:
    """Run all rounds, the servers in turns, and simulate them."""
    say, load = Progress(), LOADS[args.workload]
    slow, rate = args.slow or load.slow, args.rate or load.rate
    args.out = args.out or REPO / "out" / load.piece
    profile = Profile.load(PROFILE).with_ranks(args.ranks).stretched(slow)
    device, found = device_of(load, slow, args.ranks), servers_of(load, args.ranks, slow)
    kind = SessionPrompts if load.sessions else Prompts
    prompts = kind(device.vocabulary, args.seed, load.longest, reuse=load.sessions, prefill_only=True)
    rounds = [load.jobs(rate, slow, args.seconds, f"{args.seed}/{i}") for i in range(args.rounds)]
    told: dict[str, list[dict[str, Any]]] = {}
    # One server at a time: each has as many schedulers as there are ranks.
    with Fleet(device, CHUNK, found, False, args.out, prompts, say, together=False) as fleet:

        def once(i: int, name: str) -> Round:
            target, seed = fleet.target(name), args.seed + i
            flush(target)
            # SGLang's controller goes by what ranks had in use some time ago: one rank gets several times as many
            # requests as another, and not the same ones from both servers.
            answered = measure(fleet, name, rounds[i], seed, slow * PATIENCE_S, Homes(args.ranks, seed))
            told[name] = [get_json(target, path) or {} for path in ("/laps_status", "/server_info")]
            return answered

        seen = in_turns([v.name for v in found], args.rounds, once, say)
    text = (
        f"{args.ranks} scheduler processes, {device.what}. {load.what}; {rate:g} requests/s of the unscaled device, "
        f"{args.rounds} rounds of {args.seconds:g} s."
    )
    data = {
        "groups": [rank["group"] for rank in told[LAPS][0].get("ranks", [])],
        "emulator": {
            name: [state.get("emulated") for state in info.get("internal_states", [])]
            for name, (_, info) in told.items()
        },
    }
    return piece(load, compared(load, profile, rounds, seen, args.seed, slow), text, args.seed, data)


def simulator(load: Load, profile: Profile, slow: float = 1.0) -> Simulate:
    """Return the simulator of these servers. ``slow``: times that the profile's steps are stretched."""

    def simulate(name: str, jobs: Sequence[Job], seed: int) -> Outcome:
        laps = variants.Variant(laps=knobs(slow))
        variant, chunk = (laps, CHUNK) if name == LAPS else (variants.Variant(name), load.chunk)
        return play(profile, Trace(jobs), variant, chunk, seed=seed)[0]

    return simulate


def compared(
    load: Load,
    profile: Profile,
    rounds: Sequence[Sequence[Job]],
    seen: dict[str, list[Round]],
    seed: int,
    slow: float = 1.0,
) -> Accuracy:
    """Return the figures of all rounds, with the simulator beside them."""
    run = simulator(load, profile, slow)
    return Accuracy.of(rounds, seen, run, lambda new, old: lone_s(profile, new, old, CHUNK), seed)


def piece(load: Load, seen: Accuracy, text: str, seed: int, data: dict[str, Any]) -> Piece:
    """Return tables and ratios of all rounds."""
    judged = dict(zip(KEYS, (*map(Bar, load.bars), bars.NO_MORE, bars.EMULATED_RATE), strict=True))
    figures = [Figure.of(f"{key}, {LAPS} / {SPF}", seen.over(LAPS, SPF, key), bar) for key, bar in judged.items()]
    figures += seen.ratios("{key}, {policy}: simulated / emulated", dict.fromkeys(KEYS, bars.EMULATED))
    note = f"TTFT in ms of the stretched device, emulated / simulated; short: up to {THRESHOLD} new tokens."
    title = "Groups of ranks" if load.name == "mix" else f"Groups of ranks: {load.name}"
    raw = {
        how: {policy: {key: values[policy, key] for key in KEYS} for policy in seen.policies}
        for how, values in (("seen", seen.measured), ("simulated", seen.simulated))
    }
    table = seen.table("Groups", keys=KEYS, note=note)
    return Piece(load.piece, title, text, seed, [table], figures, data={**raw, **data})
