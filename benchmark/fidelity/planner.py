"""Accuracy of laps-plan: its predictions for three traces against emulated servers.

The planner knows the profile as shipped, with the host times assumed there, and nothing of this machine. ``--keep``
writes the figures to the file that the planner reports them from.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from typing import Any

from laps_plan.plan.words import ACCURACY
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.traffic.job import Job
from laps_plan.traffic.named import Offer, Scale, make

from benchmark.fidelity import compare
from benchmark.fidelity.compare import Accuracy, Raw, Simulator, gather
from benchmark.load.prompts import Prompts
from benchmark.results import Command, Parser, Piece
from benchmark.results.bars import PLANNED
from benchmark.rig.fleet import Fleet
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS

TRACES = ("azure", "code", "lmsys")
POLICIES = (FCFS, LAPS)
UTILISATION = 0.7
"""Share of the device's time, if no two requests were ever batched."""
LONGEST = 16384
"""Longest prompt (tokens)."""
BARS = {"short P90": PLANNED, "long P90": None}


def options(p: Parser) -> None:
    """Add the options of this command."""
    compare.add_load(p, 150.0)
    p.add_argument("--keep", action="store_true", help="make laps-plan report these figures")


def arrivals(trace: str, profile: Profile, chunk: int, span_s: float, seed: int) -> list[Job]:
    """Return the requests of one load, without history: a prefill server alone has none."""
    workload, rng = make(trace, Scale(LONGEST, 4096)), random.Random(seed)

    def alone_s(new: int) -> float:
        return float(lone_s(profile, new, 0, chunk))

    mean_s = statistics.fmean(alone_s(job.new) for job in workload.sample(2000, rng))
    jobs = workload.arrivals(Offer(UTILISATION, span_s, 1.0 / mean_s, alone_s), rng)
    return [Job(job.at_s, job.new) for job in jobs]


def run(args: argparse.Namespace) -> Piece:
    """Measure the loads, and compare with what is planned."""
    device = replace(args.device, chunk=args.chunk)
    profile, prompts = Profile.load(device.laps["profile"]), Prompts(device.vocabulary, args.seed, device.longest)
    raw: Raw = {}
    with Fleet(device, [BUILT_IN[p] for p in POLICIES], prompts, args.out, args.say, together=True) as fleet:
        for trace in TRACES:
            jobs = arrivals(trace, profile, args.chunk, args.seconds, args.seed)
            raw |= gather(fleet, trace, [jobs], POLICIES, args.seed)
    simulator = Simulator.like(device, profile, overlap=False)
    what = f"{device.what}; {UTILISATION:.0%} of the device by lone requests, {args.seconds:g} s, one prefill server"
    piece = Piece("planned", "The planner against emulated servers", f"On {what}.", args.seed)
    cases: list[dict[str, Any]] = []
    for trace, of in raw.items():
        one = Accuracy.again(of, simulator, args.seed)
        piece.figures += one.ratios(f"{trace}, {{policy}}, {{key}}: planned / emulated", BARS)
        piece.tables.append(one.table(f"{trace}: TTFT in ms, emulated / planned", keys=tuple(BARS)))
        cases += [
            {"trace": trace, "policy": policy, "figure": key, "planned_ms": 1e3 * one.simulated.median(policy, key),
             "measured_ms": 1e3 * one.measured.median(policy, key)}
            for policy in POLICIES
            for key in BARS
        ]  # fmt: skip
    if args.keep:
        ACCURACY.write_text(json.dumps({"what": what, "cases": cases}, indent=1) + "\n")
    piece.data["cases"] = cases
    return piece


COMMAND = Command("benchmark.fidelity planner", __doc__, run, options, out="planned", seed=1, every=True)
