"""Simulated against measured: the same arrivals on real servers of this CPU and in the simulator.

    python -m benchmark.sim.validate --rounds 5

Stock fcfs and LAPS, chunks of 1,024 tokens, a mixed open Poisson load (90% of 16 to 128 tokens, 10% of 2,048). What the
simulator knows is measured before, on other requests: the step model that the LAPS server fits during a training load,
and the host's time, from requests that have the server to themselves (their TTFT less their device time) and from how
much longer short requests of the training load took.
Writes profiles/cpu.json (or ``--profile-out``).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laps_core.latency.step import Coefficients
from laps_plan.profile import FOLDER, Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes, fixed, mix, uniform
from laps_plan.traffic.streams import poisson

from benchmark.load.prompts import Prompts
from benchmark.results.bars import SIMULATED
from benchmark.results.pictures import against
from benchmark.results.piece import Figure, Piece, Table, parser
from benchmark.results.rounds import interleaved, ratio
from benchmark.rig import model
from benchmark.rig.devices import CPU, DEVICES
from benchmark.rig.fleet import Fleet, busy_s, command_line, get_json
from benchmark.rig.progress import Progress
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS, ON, Variant
from benchmark.sim.calibration import Alone, Setup, alone, measure, quantiles, simulated

CHUNK = 1024
SHAPE = model.SLICED
SHORT, LONG = (16, 128), 2048
LONG_SHARE = 0.1
LADDER = (16, 32, 64, 96, 128, 256, 512, 768, 1024, 1536, 2048)
TRAINING_S = 12.0


def sizes() -> Sizes:
    """The load's lengths."""
    return mix(uniform(*SHORT), fixed(LONG), LONG_SHARE)


def mixed(rate: float, span_s: float, seed: str) -> list[Job]:
    """The load's arrivals."""
    rng, draw = random.Random(seed), sizes()
    return [Job(at_s, draw(rng)) for at_s in poisson(rate, span_s, rng)]


def setup(known: Coefficients) -> Setup:
    """This machine, with such steps."""
    source = "measured on this machine: step model fitted by the LAPS server, host time of lone requests"
    return Setup("cpu", source, known, CHUNK, SHAPE.layers)


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.sim.validate", __doc__, "validate", rounds="(5)", seed=0, whole=True)
    p.add_argument("--span", type=float, default=15.0, help="seconds of load per round and server")
    p.add_argument("--utilisation", type=float, default=0.5, help="by the step and host times of lone requests")
    p.add_argument("--profile-out", type=Path, default=FOLDER / "cpu.json")
    p.add_argument("--again", action="store_true", help="simulate what --out holds of an earlier run: no servers")
    args = p.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    raw = args.out / "raw.json"
    if not args.again:
        with command_line("sim.validate"):
            raw.write_text(json.dumps(gather(args)))
    return report(json.loads(raw.read_text()), args, argv)


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that needs real servers."""
    device, say = DEVICES[CPU], Progress()
    prompts = Prompts(device.vocabulary, args.seed, device.longest, reuse=False, prefill_only=True)
    learnt = args.out / "latency.json"
    learnt.unlink(missing_ok=True)  # of an earlier run
    learnt.parent.mkdir(parents=True, exist_ok=True)
    knobs = json.dumps({"profile": str(learnt)})
    found = [BUILT_IN[FCFS], Variant(LAPS, (ON, "--laps-config", knobs))]
    with Fleet(device, CHUNK, found, False, args.out, prompts, say, True) as fleet:

        def laps() -> dict[str, Any]:
            return get_json(fleet.target(LAPS), "/laps_status") or {}

        seen = alone(fleet, LAPS, LADDER, args.seed, lambda: busy_s(fleet.target(LAPS)) or 0.0)
        stock = alone(fleet, FCFS, LADDER, args.seed + 1)
        shorts = [s for n, s in zip(seen.tokens, seen.ttft, strict=True) if n <= SHORT[1]]
        longs = [s for n, s in zip(seen.tokens, seen.ttft, strict=True) if n == LONG]
        guess = (1 - LONG_SHARE) * statistics.mean(shorts) + LONG_SHARE * statistics.mean(longs)
        training = mixed(0.6 / guess, TRAINING_S, f"{args.seed} training")
        trained = measure(fleet, LAPS, training, args.seed)
        learnt = laps()["latency_model"]
        if not learnt["fitted"]:
            raise SystemExit(f"the latency model is not fitted: {learnt['why_not']}")
        known = setup(Coefficients(**learnt["coefficients"]))
        rate = args.utilisation / mean_s(known.under_load(seen, "laps", training, trained))
        say(f"{rate:.1f} requests/s")
        rounds: list[dict[str, Any]] = [{} for _ in range(args.rounds)]
        for i, name in interleaved((FCFS, LAPS), args.rounds):
            say(f"round {i + 1}, {name}")
            jobs = mixed(rate, args.span, f"{args.seed}/{i}")
            begin = laps()["totals"]
            rounds[i]["rows"] = [(job.at_s, job.new) for job in jobs]
            rounds[i][name] = measure(fleet, name, jobs, args.seed + i)
            rounds[i][f"{name} totals"] = {"before": begin, "after": laps()["totals"]}
        return {
            "rate": rate,
            "coefficients": learnt["coefficients"],
            "fit_error": learnt["error"],
            "alone": vars(seen),
            "alone on fcfs": vars(stock),
            "training": {"rows": [(job.at_s, job.new) for job in training], "ttft": trained},
            "rounds": rounds,
        }


def mean_s(profile: Profile) -> float:
    """Time of the scheduler process for a mean request of the load, alone (seconds)."""
    off = profile.front_s + profile.reply_s
    short = statistics.mean(float(lone_s(profile, n, 0, CHUNK)) - off for n in range(SHORT[0], SHORT[1] + 1))
    return (1 - LONG_SHARE) * short + LONG_SHARE * (float(lone_s(profile, LONG, 0, CHUNK)) - off)


def report(raw: dict[str, Any], args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Simulate, compare, write."""
    seen, training = Alone(**raw["alone"]), raw["training"]
    rows = [Job(*r) for r in training["rows"]]
    profile = setup(Coefficients(**raw["coefficients"])).under_load(seen, "laps", rows, training["ttft"])
    profile.details["fit_error"] = raw["fit_error"]
    profile.save(args.profile_out)
    told: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in ("fcfs", "laps"):
        told[name] = {"measured": {}, "simulated": {}}
        for i, one in enumerate(raw["rounds"]):
            rows = [Job(*r) for r in one["rows"]]
            record = simulated(profile, name, rows, CHUNK, args.seed + i).record
            for how, lengths, ttft in (
                ("measured", [r.new for r in rows], one[name]), ("simulated", record.new, record.ttft),
            ):  # fmt: skip
                for key, value in quantiles(lengths, ttft).items():
                    told[name][how].setdefault(key, []).append(value)
    table, figures = [], []
    for name, both in told.items():
        for key, measured in both["measured"].items():
            r = ratio(both["simulated"][key], measured)
            figures.append(Figure.of(f"{name}, {key}: simulated / measured", r, SIMULATED))
            table.append((
                name, key, *(f"{1e3 * statistics.median(both[how][key]):.1f}" for how in ("measured", "simulated")),
                str(r), "met" if SIMULATED.met(r.median) else "MISSED",
            ))  # fmt: skip
    worst = max((abs(math.log(f.value)), f.value) for f in figures)[1]
    figures.append(Figure.of("furthest simulated / measured", worst, SIMULATED))
    piece = Piece(
        "validate",
        "The simulator against real servers",
        f"The same {raw['rate']:.1f} requests/s (Poisson; 90% of {SHORT[0]} to {SHORT[1]} tokens, 10% of {LONG}; "
        f"{args.utilisation:.0%} of the scheduler process by lone requests) for {args.span:g} s a round on a real "
        "prefill server of this CPU and in the simulator. The simulator was calibrated before: on lone requests, and "
        "on a training load during which the LAPS server fitted its step model.",
        args.seed,
        [
            Table(
                "TTFT, medians over rounds",
                ("", "", "measured ms", "simulated ms", "ratio", f"within {SIMULATED}"),
                table,
                f"Step model: median error {raw['fit_error']['median']:.1%} on held-out steps. Host, "
                f"{profile.details['slowed_under_load']:.2f} times as slow under load as alone: "
                f"{1e3 * (profile.front_s + profile.reply_s):.2f} ms and {1e6 * profile.front_token_s:.1f} us/token "
                f"per request, {1e3 * (profile.step_host_s + profile.poll_s):.2f} ms per step.",
            )
        ],
        figures,
        {"validate.svg": "Simulated and measured TTFT on the same arrivals."},
        {"rate_per_s": raw["rate"], "coefficients": raw["coefficients"], "host": profile.details, "seconds": told},
    )
    against(told, args.out / "validate.svg")
    piece.leave(args.out, "benchmark.sim.validate", argv, every=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
