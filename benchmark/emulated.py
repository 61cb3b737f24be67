"""Real schedulers on an emulated device: stock policies against LAPS, and the simulator's accuracy.

    python -m benchmark.emulated --device h200-qwen3-8b,slow=10 [--loop normal]

Real prefill servers of this machine whose steps last as long as the profile says (``--laps-emulate``), with 95% LMSYS
lengths up to 256 tokens and 5% of 1,024 to 8,192 at shares of stock fcfs's capacity. The simulator runs the same
arrivals with the profile and this machine's host time, which is measured before, on lone requests (of a server without
the overlap loop, which hides a part of it) and a training load. Ratios between policies are the device's; times are
stretched and include this machine's host.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes, lmsys, log_uniform, mix
from laps_plan.traffic.streams import Closed, poisson

from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results import bars
from benchmark.results.pictures import against
from benchmark.results.piece import Figure, Piece, Table, parser, positive
from benchmark.results.rounds import interleaved, ratio
from benchmark.rig import devices
from benchmark.rig.devices import Device
from benchmark.rig.fleet import Fleet, command_line, get_json
from benchmark.rig.progress import Progress
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS, SMALL, SPF, STOCK, Variant
from benchmark.sim.calibration import Alone, Setup, alone, measure, quantiles, simulated

OTHERS = (*STOCK, SMALL)
POLICIES = (*OTHERS, LAPS)
LOADS = (0.7, 0.5, 0.85)
LONE = Variant("fcfs, lone requests", ("--schedule-policy", FCFS, devices.NORMAL_LOOP))
"""Variant whose lone requests show the host's time: the overlap loop hides a step's."""
JUDGED = 0.7
"""Load at which policies are judged against each other."""
LADDER = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TRAINING_S = 15.0
CLIENTS = 256
"""Clients of the closed loop in which the simulator measures stock fcfs's capacity."""


def sizes() -> Sizes:
    """Return the lengths of the load."""
    return mix(lmsys(256), log_uniform(1024, 8192), 0.05)


def arrivals(rate: float, span_s: float, seed: str) -> list[Job]:
    """Return the jobs of a round."""
    rng, draw = random.Random(seed), sizes()
    return [Job(at_s, draw(rng)) for at_s in poisson(rate, span_s, rng)]


def capacity(profile: Profile, chunk: int, seed: int, *, overlap: bool = True) -> float:
    """Return the simulated capacity of stock fcfs (requests/s)."""
    work = Closed(sizes(), CLIENTS, 4000, seed)
    return run(VARIANTS[FCFS], work, profile, chunk=chunk, overlap=overlap).steady(CLIENTS).require(FCFS).requests_per_s


def overlaps(args: argparse.Namespace) -> bool:
    """Return True if servers run the overlap loop."""
    return bool(args.loop == devices.OVERLAP)


def gather(args: argparse.Namespace, device: Device, raw: Path) -> None:
    """Run all loads on servers. ``raw`` is written after each load, so that a crash loses no earlier one."""
    say = Progress()
    prompts = Prompts(device.vocabulary, args.seed, device.longest, reuse=False, prefill_only=True)
    profile = Profile.load(device.laps["profile"])
    bare = Profile(name="", source="", coefficients=profile.coefficients, poll_s=0.0)
    with Fleet(
        device,
        args.chunk,
        [LONE, *(BUILT_IN[p] for p in POLICIES)],
        False,
        args.out,
        prompts,
        say,
        True,
    ) as fleet:
        say("lone requests")
        seen = alone(fleet, LONE.name, LADDER, args.seed)
        seen.device = [float(lone_s(bare, n, 0, args.chunk)) for n in seen.tokens]
        unhurried = setup(device, profile, args.chunk).profile(seen, 1.0)
        rate = capacity(unhurried, args.chunk, args.seed, overlap=overlaps(args))
        say(f"training load; stock fcfs can do {rate:.1f} requests/s")
        training = arrivals(0.6 * rate, TRAINING_S, f"{args.seed} training")
        trained = measure(fleet, FCFS, training, args.seed)
        rounds: dict[str, list[dict[str, Any]]] = {}
        for load in args.loads:
            count = args.rounds if load == JUDGED else 1
            rounds[f"{load:g}"] = [{} for _ in range(count)]
            for i, name in interleaved(POLICIES, count):
                say(f"{load:.0%}, round {i + 1} of {count}, {name}")
                jobs = arrivals(load * rate, args.seconds, f"{args.seed}/{load}/{i}")
                one = rounds[f"{load:g}"][i]
                one["rows"] = [(job.at_s, job.new) for job in jobs]
                one[name] = measure(fleet, name, jobs, args.seed + i)
            found = {
                "rate": rate, "alone": asdict(seen), "rounds": rounds,
                "training": {"rows": [(job.at_s, job.new) for job in training], "ttft": trained},
                "emulator": {p: told(fleet.prefill(p)) for p in POLICIES},
            }  # fmt: skip
            raw.write_text(json.dumps(found))


def told(target: Target) -> dict[str, Any]:
    """Return a server's statistics of its emulated device."""
    info = get_json(target, "/server_info") or {}
    states = info.get("internal_states") or [{}]
    return dict(states[0].get("emulated") or {})


def setup(device: Device, profile: Profile, chunk: int) -> Setup:
    """Return the simulator's setup of this machine with that device."""
    return Setup(
        profile.name,
        f"{profile.source}; host: this machine",
        profile.coefficients,
        chunk,
        profile.layers,
        profile.ahead,
        profile.launch_s,
        profile.slices_launch_s,
    )


@dataclass
class Load:
    """Measured and simulated figures at one load: (policy, figure) -> one value per round. Times in seconds."""

    measured: dict[tuple[str, str], list[float]]
    simulated: dict[tuple[str, str], list[float]]


def loads(raw: dict[str, Any], profile: Profile, args: argparse.Namespace, knobs: dict[str, Any]) -> Iterator[Load]:
    """Simulate the same arrivals; yield load after load."""
    for rounds in raw["rounds"].values():
        found = Load({}, {})
        for i, one in enumerate(rounds):
            rows = [Job(*r) for r in one["rows"]]
            for name in POLICIES:
                small = name == SMALL
                policy, chunk = (SPF, 2048) if small else (name, args.chunk)
                record = simulated(profile, policy, rows, chunk, args.seed + i, knobs, overlap=overlaps(args)).record
                for seen, tokens, ttft in (
                    (found.measured, [r.new for r in rows], one[name]),
                    (found.simulated, record.new, record.ttft),
                ):
                    lone = lone_s(profile, np.array(tokens), 0, args.chunk)
                    values = quantiles(tokens, ttft) | {
                        "mean": statistics.fmean(ttft),
                        "mean slowdown": float(np.mean(np.array(ttft) / lone)),
                    }
                    for key, value in values.items():
                        seen.setdefault((name, key), []).append(value)
                ends = max(at + t for (at, _), t in zip(one["rows"], one[name], strict=True))
                found.measured.setdefault((name, "requests/s"), []).append(len(rows) / ends)
        yield found


def judged(load: Load) -> list[Figure]:
    """Return LAPS's figures against the best stock policy, and against fcfs."""
    seen, figures = load.measured, []
    for key, bar, base in (
        ("short P90", bars.EMULATED_SHORT_P90, None), ("mean", bars.EMULATED_MEAN, None),
        ("mean slowdown", bars.NO_MORE, None), ("requests/s", bars.EMULATED_RATE, FCFS),
        ("long P90", bars.EMULATED_LONG_P90, FCFS),
    ):  # fmt: skip
        of = base or min(OTHERS, key=lambda p: statistics.median(seen[p, key]))
        words = of if base else f"{of}, the best of stock"
        figures.append(Figure.of(f"{key}, {LAPS} / {words}", ratio(seen[LAPS, key], seen[of, key]), bar))
    return figures


def report(raw: dict[str, Any], args: argparse.Namespace, device: Device, argv: Sequence[str] | None) -> int:
    """Simulate, compare and write the report."""
    known = Profile.load(device.laps["profile"])
    rows = [Job(*r) for r in raw["training"]["rows"]]
    calibrated = setup(device, known, args.chunk).under_load(
        Alone(**raw["alone"]), FCFS, rows, raw["training"]["ttft"], overlap=overlaps(args)
    )
    knobs = {k: v for k, v in device.laps.items() if k != "profile"}
    tables: list[Table] = []
    figures: list[Figure] = []
    shown: dict[str, dict[str, dict[str, list[float]]]] = {}
    found = dict(zip(raw["rounds"], loads(raw, calibrated, args, knobs), strict=True))
    keys = ("short P50", "short P90", "long P50", "long P90", "mean")
    for name, load in found.items():
        cells = []
        for policy in POLICIES:
            medians = [[statistics.median(s[policy, k]) for k in keys] for s in (load.measured, load.simulated)]
            cells.append((policy, *(f"{1e3 * m:.0f} / {1e3 * s:.0f}" for m, s in zip(*medians, strict=True))))
            for k in keys[:4]:
                r = ratio(load.simulated[policy, k], load.measured[policy, k])
                figures.append(Figure.of(f"{policy} at {float(name):.0%}, {k}: simulated / emulated", r, bars.EMULATED))
                label = f"{policy} {float(name):.0%}"
                for how, seen in (("measured", load.measured), ("simulated", load.simulated)):
                    shown.setdefault(label, {}).setdefault(how, {})[k] = seen[policy, k]
        tables.append(
            Table(
                f"At {float(name):.0%} of what stock fcfs can do: TTFT in ms, emulated / simulated", ("", *keys), cells
            )
        )
    if f"{JUDGED:g}" in found:
        figures = judged(found[f"{JUDGED:g}"]) + figures
        tables.insert(0, tables.pop(list(found).index(f"{JUDGED:g}")))
    steps = []
    for policy, of in raw["emulator"].items():
        lasted = of["lasted_over_profile"]
        steps.append((policy, f"{of['steps']}", f"{lasted['median']:.4f}", f"{lasted['p99']:.3f}", f"{of['overrun']}",
                      f"{of['host_share']:.1%}"))  # fmt: skip
        figures.append(Figure.of(f"step as it lasted over the profile, {policy}, median", lasted["median"], bars.STEP))
    tables.append(
        Table("The emulator's own error", ("", "steps", "median", "P99", "overrun", "tiny model's share"), steps,
              "Steps as they lasted over the profile's; overrun: the tiny model alone took longer.")
    )  # fmt: skip
    piece = Piece(
        args.out.name,
        f"Emulated: {known.name}",
        f"Real prefill servers of this machine, SGLang's {args.loop} loop, with {device.what}. "
        f"{1 - 0.05:.0%} LMSYS lengths up to 256 tokens, 5% "
        f"of 1,024 to 8,192, Poisson, rounds of {args.seconds:g} s, {args.rounds} at {JUDGED:.0%} and one at the "
        f"other loads; stock fcfs can do "
        f"{raw['rate']:.1f} requests/s (simulated). Chunks of {args.chunk} tokens. Host beside the device: "
        f"{1e3 * (calibrated.front_s + calibrated.reply_s):.1f} ms a request, "
        f"{1e3 * (calibrated.step_host_s + calibrated.poll_s):.1f} ms a step.",
        args.seed,
        tables,
        figures,
        {"emulated.svg": "Simulated and emulated TTFT on the same arrivals."},
        {"device": device.name, "loop": args.loop, "rate_per_s": raw["rate"], "emulator": raw["emulator"],
         "host": calibrated.details, "seconds": shown},
    )  # fmt: skip
    against(shown, args.out / "emulated.svg")
    piece.leave(args.out, "benchmark.emulated", argv, every=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    rounds = f"rounds at {100 * JUDGED:g}%% (3); one at the other loads"
    p = parser("python -m benchmark.emulated", __doc__, "emulated", rounds=rounds, seed=1, whole=True)
    p.set_defaults(rounds=3)
    devices.add_emulated(p)
    devices.add_loop(p, devices.OVERLAP)
    p.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size, tokens (8192)")
    p.add_argument("--seconds", type=positive, default=90.0, help="duration of a round's arrivals (90)")
    p.add_argument("--loads", type=float, nargs="+", default=list(LOADS), help="shares of stock fcfs's capacity")
    p.add_argument("--again", action="store_true", help="only simulate the arrivals of an earlier run in --out")
    args = p.parse_args(argv)
    with command_line("emulated"):
        device: Device = args.device.in_loop(args.loop)
        args.out.mkdir(parents=True, exist_ok=True)
        raw: Path = args.out / "raw.json"
        if not args.again:
            gather(args, device, raw)
        return report(json.loads(raw.read_text()), args, device, argv)


if __name__ == "__main__":
    sys.exit(main())
