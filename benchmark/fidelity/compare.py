"""The same arrivals on real servers and in the simulator: figures of both, and one over the other."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from laps_plan.profile import Profile
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.lengths import Sizes
from laps_plan.traffic.streams import Trace, poisson

from benchmark.load import client
from benchmark.results.bars import Bar
from benchmark.results.metrics import quantile
from benchmark.results.piece import Figure, Table
from benchmark.results.rounds import in_turns, ratio
from benchmark.rig import devices
from benchmark.rig.devices import Device
from benchmark.rig.fleet import Fleet
from benchmark.rig.variants import SMALL, SPF

PATIENCE_S = 60.0
KEYS = ("short P50", "short P90", "long P50", "long P90")
MEAN, SLOWDOWN, RATE = "mean", "mean slowdown", "requests/s"

Raw = dict[str, dict[str, Any]]
"""Load -> "rows": (time, new tokens) of each request, "ttft": seconds by policy; of each round."""
Values = dict[tuple[str, str], list[float]]
"""(policy, figure) -> one value per round. Times in seconds."""


def drawn(sizes: Sizes, rate: float, span_s: float, seed: str) -> list[Job]:
    """Return jobs of these lengths at Poisson times."""
    rng = random.Random(seed)
    return [Job(at_s, sizes(rng)) for at_s in poisson(rate, span_s, rng)]


def add_load(p: argparse.ArgumentParser, seconds: float) -> None:
    """Add --device, --chunk and --seconds of commands that run on emulated devices."""
    devices.add_emulated(p)
    p.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size, tokens (8192)")
    p.add_argument("--seconds", type=float, default=seconds, help=f"duration of a round's arrivals ({seconds:g})")


def again(args: argparse.Namespace, gather: Callable[[Callable[[Any], None]], None]) -> Any:
    """Return what ``gather`` has kept, from a file in --out; with --again what an earlier run has."""
    args.out.mkdir(parents=True, exist_ok=True)
    raw = args.out / "raw.json"
    if not args.again:
        gather(lambda found: raw.write_text(json.dumps(found)))
    return json.loads(raw.read_text())


def add_again(p: argparse.ArgumentParser) -> None:
    """Add --again."""
    p.add_argument("--again", action="store_true", help="only simulate the arrivals of an earlier run in --out")


@dataclass(frozen=True)
class Simulator:
    """The simulator in the place of servers."""

    profile: Profile
    chunk: int
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """LAPS knobs of the device."""
    overlap: bool = False
    """True for SGLang's overlap loop."""

    @classmethod
    def like(cls, device: Device, profile: Profile, chunk: int, *, overlap: bool) -> Simulator:
        """Return the simulator of servers on an emulated device."""
        return cls(profile, chunk, {k: v for k, v in device.laps.items() if k != "profile"}, overlap)

    def run(self, policy: str, jobs: Sequence[Job], seed: int = 0) -> Outcome:
        """Simulate one load."""
        name, chunk = (SPF, 2048) if policy == SMALL else (policy, self.chunk)
        return run(
            VARIANTS[name], Trace(jobs), self.profile, chunk=chunk, seed=seed, knobs=self.knobs, overlap=self.overlap
        )


def measure(fleet: Fleet, name: str, jobs: Sequence[Job], seed: int) -> list[float]:
    """Return the TTFT of each job on a real server (seconds). Raises ConnectionError if one fails."""
    bodies = fleet.prompts.bodies(jobs, seed)
    seen = [a.ttft_s for a in asyncio.run(client.replay(fleet.target(name), jobs, bodies, PATIENCE_S))]
    if None in seen:
        raise ConnectionError(f"{seen.count(None)} requests to {name} failed")
    return [t for t in seen if t is not None]


def gather(
    fleet: Fleet, load: str, rounds: Sequence[Sequence[Job]], policies: Sequence[str], seed: int, say: Any
) -> Raw:
    """Run the rounds of one load on all servers, in turns."""
    ttft = in_turns(
        policies, len(rounds), lambda i, name: measure(fleet, name, rounds[i], seed + i), say, f"{load}: "
    )  # fmt: skip
    return {load: {"rows": [[(job.at_s, job.new) for job in jobs] for jobs in rounds], "ttft": ttft}}


def quantiles(tokens: Sequence[int], ttft: Sequence[float]) -> dict[str, float]:
    """Return P50 and P90 of both classes (seconds)."""
    rows = list(zip(tokens, ttft, strict=True))
    short, long = ([t for n, t in rows if (n <= THRESHOLD) is wanted] for wanted in (True, False))
    return dict(zip(KEYS, (quantile(times, q) for times in (short, long) for q in (50, 90)), strict=True))


@dataclass
class Seen:
    """One load, measured and simulated."""

    measured: Values = field(default_factory=dict)
    simulated: Values = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any], simulator: Simulator, seed: int) -> Seen:
        """Simulate the arrivals of a load that was run on servers."""
        found = cls()
        for i, rows in enumerate(raw["rows"]):
            jobs = [Job(*row) for row in rows]
            for policy, rounds in raw["ttft"].items():
                record = simulator.run(policy, jobs, seed + i).record
                found._add(found.measured, policy, [job.new for job in jobs], rounds[i], simulator)
                found._add(found.simulated, policy, record.new, record.ttft, simulator)
                ends_s = max(job.at_s + t for job, t in zip(jobs, rounds[i], strict=True))
                found.measured.setdefault((policy, RATE), []).append(len(jobs) / ends_s)
        return found

    @staticmethod
    def _add(to: Values, policy: str, new: Sequence[int], ttft: Sequence[float], simulator: Simulator) -> None:
        slow = np.array(ttft) / lone_s(simulator.profile, list(new), [0] * len(new), simulator.chunk)
        values = quantiles(new, ttft) | {MEAN: statistics.fmean(ttft), SLOWDOWN: float(slow.mean())}
        for key, value in values.items():
            to.setdefault((policy, key), []).append(value)

    @property
    def policies(self) -> list[str]:
        """Return the policies that were run."""
        return list(dict.fromkeys(policy for policy, _ in self.measured))

    def table(self, title: str, *, keys: Sequence[str] = (*KEYS, MEAN)) -> Table:
        """Return medians over rounds of both (ms)."""
        cells = []
        for policy in self.policies:
            both = ((self.measured[policy, key], self.simulated[policy, key]) for key in keys)
            medians = ([1e3 * statistics.median(values) for values in pair] for pair in both)
            cells.append((policy, *(f"{m:.0f} / {s:.0f}" for m, s in medians)))
        return Table(title, ("", *keys), cells)

    def ratios(self, name: str, bars: Mapping[str, Bar | None]) -> list[Figure]:
        """Return simulated over measured figures. ``name``: theirs, with {policy} and {key}; ``bars``: of each key."""
        return [
            Figure.of(
                name.format(policy=policy, key=key),
                ratio(self.simulated[policy, key], self.measured[policy, key]), bar,
            )
            for policy in self.policies
            for key, bar in bars.items()
        ]  # fmt: skip

    def seconds(self, policy: str) -> dict[str, dict[str, list[float]]]:
        """Return both by figure, for a picture and for the raw data."""
        both = {"measured": self.measured, "simulated": self.simulated}
        return {how: {key: values[policy, key] for key in KEYS} for how, values in both.items()}
