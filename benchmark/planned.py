"""Accuracy of laps-plan: its predictions for three loads against emulated servers.

    python -m benchmark.planned --device h200-qwen3-8b,slow=10 [--keep]

The planner knows the profile as shipped, with the host times assumed there, and nothing of this machine. ``--keep``
writes the figures to the file that the planner reports them from.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence

from laps_plan.plan.words import ACCURACY
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.traffic.job import Job
from laps_plan.traffic.named import Offer, Scale, make

from benchmark.load.prompts import Prompts
from benchmark.results import bars
from benchmark.results.piece import Figure, Piece, Table, parser, positive
from benchmark.rig import devices
from benchmark.rig.devices import Device
from benchmark.rig.fleet import Fleet, command_line
from benchmark.rig.progress import Progress
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS
from benchmark.sim.calibration import measure, quantiles, simulated

TRACES = ("azure", "code", "lmsys")
POLICIES = (FCFS, LAPS)
UTILISATION = 0.7
"""Share of the device's time, if no two requests were ever batched."""
LONGEST = 16384
"""Longest prompt (tokens)."""


def arrivals(trace: str, profile: Profile, chunk: int, span_s: float, seed: int) -> list[Job]:
    """Return the requests of one load, without history: a prefill server alone has none."""
    workload, rng = make(trace, Scale(LONGEST, 4096)), random.Random(seed)

    def alone_s(new: int) -> float:
        return float(lone_s(profile, new, 0, chunk))

    mean_s = statistics.fmean(alone_s(job.new) for job in workload.sample(2000, rng))
    jobs = workload.arrivals(Offer(UTILISATION, span_s, 1.0 / mean_s, alone_s), rng)
    return [Job(job.at_s, job.new) for job in jobs]


def compared(args: argparse.Namespace, device: Device) -> list[dict[str, object]]:
    """Return planned and measured quantiles of each load and policy (milliseconds)."""
    say, profile = Progress(), Profile.load(device.laps["profile"])
    knobs = {k: v for k, v in device.laps.items() if k != "profile"}
    prompts = Prompts(device.vocabulary, args.seed, device.longest, reuse=False, prefill_only=True)
    cases: list[dict[str, object]] = []
    with Fleet(device, args.chunk, [BUILT_IN[p] for p in POLICIES], False, args.out, prompts, say, True) as fleet:
        for trace in TRACES:
            jobs = arrivals(trace, profile, args.chunk, args.seconds, args.seed)
            for policy in POLICIES:
                say(f"{trace}, {policy}: {len(jobs)} requests")
                record = simulated(profile, policy, jobs, args.chunk, args.seed, knobs).record
                planned = quantiles(record.new, record.ttft)
                seen = quantiles([job.new for job in jobs], measure(fleet, policy, jobs, args.seed))
                cases += [
                    {"trace": trace, "policy": policy, "figure": key, "planned_ms": 1e3 * planned[key],
                     "measured_ms": 1e3 * seen[key]}
                    for key in ("short P90", "long P90")
                ]  # fmt: skip
    return cases


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.planned", __doc__, "planned", seed=1, whole=True)
    devices.add_emulated(p)
    p.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size, tokens (8192)")
    p.add_argument("--seconds", type=positive, default=150.0, help="duration of each load's arrivals (150)")
    p.add_argument("--keep", action="store_true", help="make laps-plan report these figures")
    args = p.parse_args(argv)
    with command_line("planned"):
        device: Device = args.device
        cases = compared(args, device)
    rows, figures = [], []
    for case in cases:
        planned, measured = float(str(case["planned_ms"])), float(str(case["measured_ms"]))
        rows.append((*(str(case[k]) for k in ("trace", "policy", "figure")), f"{planned:.0f}", f"{measured:.0f}"))
        bar = bars.PLANNED if case["figure"] == "short P90" else None
        name = f"{case['trace']}, {case['policy']}, {case['figure']}: planned / emulated"
        figures.append(Figure.of(name, planned / measured, bar))
    what = f"{device.what}; {UTILISATION:.0%} of the device by lone requests, {args.seconds:g} s, one prefill server"
    Piece(
        "planned", "The planner against emulated servers", f"On {what}.", args.seed,
        [Table("TTFT (ms)", ("load", "policy", "", "planned", "emulated"), rows)], figures, data={"cases": cases},
    ).leave(args.out, "benchmark.planned", argv, every=True)  # fmt: skip
    if args.keep:
        ACCURACY.write_text(json.dumps({"what": what, "cases": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
