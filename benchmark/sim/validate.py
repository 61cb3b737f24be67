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
import asyncio
import itertools
import json
import math
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from laps_core.latency.model import Coefficients
from laps_plan.profile import FOLDER, Profile
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes, fixed, mix, uniform
from laps_plan.traffic.streams import Trace, poisson
from scipy.optimize import nnls

from benchmark.load import client
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

CHUNK = 1024
SHAPE = model.SLICED
SHORT, LONG = (16, 128), 2048
LONG_SHARE = 0.1
LADDER = (16, 32, 64, 96, 128, 256, 512, 768, 1024, 1536, 2048)
REPEATS = 14
PAUSE_S = 0.03
"""Mean pause between lone requests (seconds)."""
TRAINING_S = 12.0
PATIENCE_S = 60.0


def sizes() -> Sizes:
    """The load's lengths."""
    return mix(uniform(*SHORT), fixed(LONG), LONG_SHARE)


def mixed(rate: float, span_s: float, seed: str) -> list[Job]:
    """The load's arrivals."""
    rng, draw = random.Random(seed), sizes()
    return [Job(at_s, draw(rng)) for at_s in poisson(rate, span_s, rng)]


def measure(fleet: Fleet, name: str, jobs: Sequence[Job], seed: int) -> list[float]:
    """TTFT of each on a real server (seconds). Raises ConnectionError if one fails."""
    bodies = fleet.prompts.bodies(jobs, seed)
    seen = [a.ttft_s for a in asyncio.run(client.replay(fleet.target(name), jobs, bodies, PATIENCE_S))]
    if None in seen:
        raise ConnectionError(f"{seen.count(None)} requests to {name} failed")
    return [t for t in seen if t is not None]


@dataclass
class Alone:
    """Requests that had their server to themselves. Times in seconds."""

    tokens: list[int]
    ttft: list[float]
    device: list[float]
    """Device time, where the server tells it; else empty."""


def alone(fleet: Fleet, name: str, seed: int, *, told: bool) -> Alone:
    """Every length of the ladder, in random order, with pauses as they occur under load: a server that has just
    answered is quicker. ``told``: it has /laps_status, which is read after each.
    """
    rng = random.Random(f"{seed} alone")
    tokens = [n for n in LADDER for _ in range(REPEATS)]
    rng.shuffle(tokens)
    target, busy = fleet.target(name), []

    def bodies() -> Iterator[bytes]:
        for body in fleet.prompts.bodies([Job(0.0, n) for n in tokens], seed):
            if told:
                busy.append(busy_s(target) or 0.0)
            time.sleep(rng.expovariate(1.0 / PAUSE_S))
            yield body
        if told:
            busy.append(busy_s(target) or 0.0)

    ttft = asyncio.run(client.one_by_one(target, bodies()))
    return Alone(tokens, ttft, [b - a for a, b in itertools.pairwise(busy)])


def calibrate(known: Coefficients, seen: Alone, slowed: float) -> Profile:
    """The profile: the fitted step model, host times and the spread of steps from requests alone.

    What the TTFT of a lone request leaves beside its device time is a constant, a share per token and a share per step.
    Under load these take ``slowed`` times as long: client, HTTP and scheduler share two cores.
    """
    tokens, left = np.array(seen.tokens), np.array(seen.ttft) - np.array(seen.device)
    lengths = sorted(set(seen.tokens))
    middle = np.array([np.median(left[tokens == n]) for n in lengths])
    columns = np.column_stack(
        (np.ones(len(lengths)), np.array(lengths, dtype=float), np.ceil(np.array(lengths) / CHUNK))
    )
    fixed, per_token, per_step = nnls(columns / middle[:, None], np.ones(len(lengths)))[0].tolist()
    bare = Profile(name="cpu", source="", coefficients=known, poll_s=0.0)
    # One step each: how its time varies around what the model says.
    factors = sorted(
        took / float(lone_s(bare, n, 0, CHUNK)) for n, took in zip(seen.tokens, seen.device, strict=True) if n <= CHUNK
    )
    usual = statistics.median(factors)
    return Profile(
        name="cpu",
        source="measured on this machine: step model fitted by the LAPS server, host time of lone requests",
        coefficients=known,
        front_s=slowed * fixed / 2,
        front_token_s=slowed * per_token,
        poll_s=slowed * per_step / 2,
        step_host_s=slowed * per_step / 2,
        reply_s=slowed * fixed / 2,
        layers=SHAPE.layers,
        spread=[round(f / usual, 4) for f in factors],
        details={
            "chunk": CHUNK,
            "slowed_under_load": slowed,
            "lone_ttft_ms": {str(n): 1e3 * float(np.median(np.array(seen.ttft)[tokens == n])) for n in lengths},
            "beside_the_device_ms": {str(n): 1e3 * float(m) for n, m in zip(lengths, middle, strict=True)},
        },
    )


def slowed_by_load(known: Coefficients, seen: Alone, rows: Sequence[Job], ttft: Sequence[float]) -> float:
    """How much longer the host takes under load than alone: by which the simulator gives the median TTFT that short
    requests of the training load had.
    """
    wanted = quantiles([r.new for r in rows], ttft)["short P50"]

    def over(slowed: float) -> bool:
        record = simulated(calibrate(known, seen, slowed), "laps", rows, 0).record
        return quantiles(record.new, record.ttft)["short P50"] > wanted

    grid = [x / 100 for x in range(100, 301)]
    return grid[min(bisect_left(grid, True, key=over), len(grid) - 1)]


def simulated(profile: Profile, name: str, rows: Sequence[Job], seed: int) -> Outcome:
    """The same arrivals in the simulator."""
    return run(VARIANTS[name], Trace(rows), profile, chunk=CHUNK, seed=seed)


def quantiles(tokens: Sequence[int], ttft: Sequence[float]) -> dict[str, float]:
    """Name -> seconds."""
    found = {}
    for kind, wanted in (("short", False), ("long", True)):
        times = [t for n, t in zip(tokens, ttft, strict=True) if (n == LONG) is wanted]
        for q in (50, 90):
            found[f"{kind} P{q}"] = float(np.percentile(times, q))
    return found


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

        seen = alone(fleet, LAPS, args.seed, told=True)
        stock = alone(fleet, FCFS, args.seed + 1, told=False)
        shorts = [s for n, s in zip(seen.tokens, seen.ttft, strict=True) if n <= SHORT[1]]
        longs = [s for n, s in zip(seen.tokens, seen.ttft, strict=True) if n == LONG]
        guess = (1 - LONG_SHARE) * statistics.mean(shorts) + LONG_SHARE * statistics.mean(longs)
        training = mixed(0.6 / guess, TRAINING_S, f"{args.seed} training")
        trained = measure(fleet, LAPS, training, args.seed)
        learnt = laps()["latency_model"]
        if not learnt["fitted"]:
            raise SystemExit(f"the latency model is not fitted: {learnt['why_not']}")
        known = Coefficients(**learnt["coefficients"])
        rate = args.utilisation / mean_s(calibrate(known, seen, slowed_by_load(known, seen, training, trained)))
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
    known = Coefficients(**raw["coefficients"])
    seen, training = Alone(**raw["alone"]), raw["training"]
    profile = calibrate(known, seen, slowed_by_load(known, seen, [Job(*r) for r in training["rows"]], training["ttft"]))
    profile.details["fit_error"] = raw["fit_error"]
    profile.save(args.profile_out)
    told: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in ("fcfs", "laps"):
        told[name] = {"measured": {}, "simulated": {}}
        for i, one in enumerate(raw["rounds"]):
            rows = [Job(*r) for r in one["rows"]]
            record = simulated(profile, name, rows, args.seed + i).record
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
