"""Simulated against measured on this CPU: stock fcfs and LAPS under a mixed open Poisson load.

What the simulator knows is measured before, on other requests: the step model that the LAPS server fits during a
training load, and the host's time, from requests that have the server to themselves (their TTFT less their device time)
and from how much longer short requests of the training load took. Writes profiles/cpu.json (or ``--profile-out``).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from laps_core.latency.step import Coefficients
from laps_plan.profile import FOLDER, Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes, fixed, mix, uniform
from scipy.optimize import nnls

from benchmark.fidelity.compare import KEYS, Accuracy, Simulator, add_again, again, drawn, gather, measure, quantiles
from benchmark.load import client
from benchmark.load.prompts import Prompts
from benchmark.results import Command, Figure, Parser, Piece
from benchmark.results.bars import SIMULATED
from benchmark.results.pictures import against
from benchmark.rig import model
from benchmark.rig.devices import CPU, DEVICES
from benchmark.rig.fleet import Fleet, busy_s, get_json
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS, ON, Variant

REPEATS = 14
PAUSE_S = 0.03
"""Mean pause between lone requests (seconds)."""


@dataclass
class Alone:
    """Requests that had their server to themselves. Times in seconds."""

    tokens: list[int]
    ttft: list[float]
    device: list[float]
    """Device time; empty if unknown."""


@dataclass(frozen=True)
class Setup:
    """A server whose host is to be calibrated."""

    device: Profile
    """The device alone, without any time of a host."""
    chunk: int
    """Tokens."""

    @classmethod
    def of(cls, known: Profile, chunk: int) -> Setup:
        """Return the setup of this machine with the device of a profile."""
        bare = Profile(
            name=known.name, source=f"{known.source}; host: this machine", coefficients=known.coefficients, poll_s=0.0,
            layers=known.layers, ahead=known.ahead, launch_s=known.launch_s, slices_launch_s=known.slices_launch_s,
        )  # fmt: skip
        return cls(bare, chunk)

    def alone_s(self, tokens: Sequence[int]) -> list[float]:
        """Return the device time of prompts alone (seconds)."""
        bare = Profile(name="", source="", coefficients=self.device.coefficients, poll_s=0.0)
        return [float(s) for s in lone_s(bare, list(tokens), [0] * len(tokens), self.chunk)]

    def profile(self, seen: Alone, slowed: float) -> Profile:
        """Return the profile: the step model, host times and the spread of steps from requests alone.

        What the TTFT of a lone request leaves beside its device time is a constant, a share per token and a share per
        step; with the overlap loop that of a step is hidden, so they are to be of a server without it. Under load these
        take ``slowed`` times as long: client, HTTP and scheduler share few cores.
        """
        tokens, left = np.array(seen.tokens), np.array(seen.ttft) - np.array(seen.device)
        lengths = sorted(set(seen.tokens))
        middle = np.array([np.median(left[tokens == n]) for n in lengths])
        columns = np.column_stack(
            (np.ones(len(lengths)), np.array(lengths, dtype=float), np.ceil(np.array(lengths) / self.chunk))
        )
        fixed, per_token, per_step = nnls(columns / middle[:, None], np.ones(len(lengths)))[0].tolist()
        # One step each: how its time varies around what the model says.
        rows = zip(seen.tokens, seen.device, self.alone_s(seen.tokens), strict=True)
        factors = sorted(took / model_s for n, took, model_s in rows if n <= self.chunk)
        usual = statistics.median(factors)
        return replace(
            self.device,
            front_s=slowed * fixed / 2,
            front_token_s=slowed * per_token,
            poll_s=slowed * per_step / 2,
            step_host_s=slowed * per_step / 2,
            reply_s=slowed * fixed / 2,
            spread=[round(f / usual, 4) for f in factors],
            details={
                "chunk": self.chunk,
                "slowed_under_load": slowed,
                "lone_ttft_ms": {str(n): 1e3 * float(np.median(np.array(seen.ttft)[tokens == n])) for n in lengths},
                "beside_the_device_ms": {str(n): 1e3 * float(m) for n, m in zip(lengths, middle, strict=True)},
            },
        )

    def under_load(
        self, seen: Alone, policy: str, jobs: Sequence[Job], ttft: Sequence[float], *, overlap: bool = False
    ) -> Profile:
        """Return the profile of a host that is as much slower under load than alone as makes the simulator give the
        median TTFT (seconds) that short requests of the load ``jobs`` had."""
        wanted = quantiles([job.new for job in jobs], ttft)["short P50"]

        def over(slowed: float) -> bool:
            record = Simulator(self.profile(seen, slowed), self.chunk, overlap=overlap).run(policy, jobs).record
            return quantiles(record.new, record.ttft)["short P50"] > wanted

        grid = [x / 100 for x in range(100, 301)]
        return self.profile(seen, grid[min(bisect_left(grid, True, key=over), len(grid) - 1)])


def alone(
    fleet: Fleet, name: str, lengths: Sequence[int], seed: int, busy_s: Callable[[], float] | None = None
) -> Alone:
    """Send every length, in random order, with pauses as they occur under load: a server that has just answered is
    quicker. ``busy_s``: tells the device time that the server has used so far; asked after each."""
    rng = random.Random(f"{seed} alone")
    # Long ones are sent less often, they vary less.
    tokens = [n for n in lengths for _ in range(REPEATS if n <= 4096 else REPEATS // 3)]
    rng.shuffle(tokens)
    busy = []

    def bodies() -> Iterator[bytes]:
        for body in fleet.prompts.bodies([Job(0.0, n) for n in tokens], seed):
            if busy_s:
                busy.append(busy_s())
            time.sleep(rng.expovariate(1.0 / PAUSE_S))
            yield body
        if busy_s:
            busy.append(busy_s())

    ttft = asyncio.run(client.one_by_one(fleet.target(name), bodies()))
    return Alone(tokens, ttft, [b - a for a, b in itertools.pairwise(busy)])


CHUNK = 1024
SHORT, LONG, LONG_SHARE = (16, 128), 2048, 0.1
LADDER = (16, 32, 64, 96, 128, 256, 512, 768, 1024, 1536, 2048)
TRAINING_S = 12.0
MIXED = "mixed"


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--span", type=float, default=15.0, help="seconds of load per round and server (15)")
    p.add_argument("--utilisation", type=float, default=0.5, help="by the step and host times of lone requests (0.5)")
    p.add_argument("--profile-out", type=Path, default=FOLDER / "cpu.json", help="the profile that is written")
    add_again(p)


def sizes() -> Sizes:
    """Return the load's lengths."""
    return mix(uniform(*SHORT), fixed(LONG), LONG_SHARE)


def setup(known: Coefficients) -> Setup:
    """Return this machine, with such steps."""
    source = "measured on this machine: step model fitted by the LAPS server, host time of lone requests"
    return Setup(Profile(name="cpu", source=source, coefficients=known, layers=model.SLICED.layers), CHUNK)


def run(args: argparse.Namespace) -> Piece:
    """Measure, calibrate, simulate and compare."""
    raw = again(args, lambda keep: keep(measured(args)))
    jobs = [Job(*row) for row in raw["training"]["rows"]]
    known = setup(Coefficients(**raw["coefficients"]))
    profile = known.under_load(Alone(**raw["alone"]), LAPS, jobs, raw["training"]["ttft"])
    profile.details["fit_error"] = raw["fit_error"]
    profile.save(args.profile_out)
    seen = Accuracy.again(raw["loads"][MIXED], Simulator(profile, CHUNK), args.seed)
    figures = seen.ratios("{policy}, {key}: simulated / measured", dict.fromkeys(KEYS, SIMULATED))
    worst = max((abs(math.log(f.value)), f.value) for f in figures)[1]
    figures.append(Figure.of("furthest simulated / measured", worst, SIMULATED))
    table = seen.table("TTFT (ms), medians over rounds, measured / simulated")
    table.note = (
        f"Step model: median error {raw['fit_error']['median']:.1%} on held-out steps. Host, "
        f"{profile.details['slowed_under_load']:.2f} times as slow under load as alone: "
        f"{1e3 * (profile.front_s + profile.reply_s):.2f} ms and {1e6 * profile.front_token_s:.1f} us/token "
        f"per request, {1e3 * (profile.step_host_s + profile.poll_s):.2f} ms per step."
    )
    told = {policy: seen.seconds(policy) for policy in seen.measured.rounds}
    against(told, args.out / "validate.svg")
    text = (
        f"The same {raw['rate']:.1f} requests/s (Poisson; 90% of {SHORT[0]} to {SHORT[1]} tokens, 10% of {LONG}; "
        f"{args.utilisation:.0%} of the scheduler process by lone requests) for {args.span:g} s a round on a real "
        "prefill server of this CPU and in the simulator. The simulator was calibrated before: on lone requests, and "
        "on a training load during which the LAPS server fitted its step model."
    )
    captions = {"validate.svg": "Simulated and measured TTFT on the same arrivals."}
    data = {"rate_per_s": raw["rate"], "coefficients": raw["coefficients"], "host": profile.details, "seconds": told}
    title = "The simulator against real servers"
    return Piece("validate", title, text, args.seed, [table], figures, captions, data)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything that needs real servers."""
    device = replace(DEVICES[CPU], chunk=CHUNK)
    prompts, learnt = Prompts(device.vocabulary, args.seed, device.longest), args.out / "latency.json"
    learnt.unlink(missing_ok=True)  # of an earlier run
    found = [BUILT_IN[FCFS], Variant(LAPS, (ON, "--laps-config", json.dumps({"profile": str(learnt)})))]
    with Fleet(device, found, prompts, args.out, args.say, together=True) as fleet:
        seen = alone(fleet, LAPS, LADDER, args.seed, lambda: busy_s(fleet.target(LAPS)) or 0.0)
        short_s, long_s = (
            statistics.mean(s for n, s in zip(seen.tokens, seen.ttft, strict=True) if low <= n <= high)
            for low, high in ((0, SHORT[1]), (LONG, LONG))
        )
        guess = 0.6 / ((1 - LONG_SHARE) * short_s + LONG_SHARE * long_s)
        training = drawn(sizes(), guess, TRAINING_S, f"{args.seed} training")
        trained = measure(fleet, LAPS, training, args.seed)["ttft"]
        fitted = (get_json(fleet.target(LAPS), "/laps_status") or {})["latency_model"]
        if not fitted["fitted"]:
            raise SystemExit(f"the latency model is not fitted: {fitted['why_not']}")
        known = setup(Coefficients(**fitted["coefficients"]))
        rate = args.utilisation / mean_s(known.under_load(seen, LAPS, training, trained))
        args.say(f"{rate:.1f} requests/s")
        rounds = [drawn(sizes(), rate, args.span, f"{args.seed}/{i}") for i in range(args.rounds)]
        return {
            "rate": rate, "coefficients": fitted["coefficients"], "fit_error": fitted["error"], "alone": vars(seen),
            "training": {"rows": [(job.at_s, job.new) for job in training], "ttft": trained},
            "loads": gather(fleet, MIXED, rounds, (FCFS, LAPS), args.seed),
        }  # fmt: skip


def mean_s(profile: Profile) -> float:
    """Return the time of the scheduler process for a mean request of the load, alone (seconds)."""

    def alone_s(n: int) -> float:
        return float(lone_s(profile, n, 0, CHUNK)) - profile.front_s - profile.reply_s

    short_s = statistics.mean(alone_s(n) for n in range(SHORT[0], SHORT[1] + 1))
    return (1 - LONG_SHARE) * short_s + LONG_SHARE * alone_s(LONG)


COMMAND = Command("benchmark.fidelity cpu", __doc__, run, options, out="validate", rounds=5, seed=1, every=True)
