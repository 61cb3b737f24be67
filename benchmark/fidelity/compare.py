"""Figures of real servers and of the simulator for the same arrivals, and their ratios."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from laps_plan.profile import Profile
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.variants import run
from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.lengths import Sizes
from laps_plan.traffic.streams import Stream, Trace, poisson

from benchmark.load import Answer, Route, client
from benchmark.results import Bar, Column, Comparison, Figure, Table, quantile, ratio, ttft_paths
from benchmark.rig import SMALL, SPF, Fleet

PATIENCE_S = 60.0
KEYS = tuple(ttft_paths(50, 90))
MEAN, SLOWDOWN, RATE, TOKENS = "mean", "mean slowdown", "requests/s", "tokens/s"
FORMS = {SLOWDOWN: (".1f", 1.0), RATE: (".0f", 1.0), TOKENS: (".0f", 1.0)}
"""Formats and factors of figures. All other figures are times, shown in ms."""
Round = dict[str, Any]
"""One round (seconds): ``ttft`` of each request, and ``ended_s``, the time of the last answer."""


def drawn(sizes: Sizes, rate: float, span_s: float, seed: str) -> list[Job]:
    """Return jobs with random lengths from ``sizes`` at Poisson times."""
    rng = random.Random(seed)
    return [Job(at_s, sizes(rng)) for at_s in poisson(rate, span_s, rng)]


@dataclass(frozen=True)
class Simulator:
    """The simulator with the settings of the compared servers."""

    profile: Profile
    chunk: int
    """New tokens of a batch; in a group, of each rank's batch."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """LAPS knobs of the device."""
    chunks: Mapping[str, int] = field(default_factory=lambda: {SMALL: 2048})
    """Policy -> its own chunk, if it has one."""
    overlap: bool = True
    """True for SGLang's overlap loop."""

    def run(self, policy: str, load: Sequence[Job] | Stream, seed: int = 0, **more: Any) -> Outcome:
        """Simulate one load. ``more``: further arguments of ``laps_plan.sim.variants.run``."""
        own, group = SPF if policy == SMALL else policy, self.profile.group
        chunk = (group.ranks if group else 1) * self.chunks.get(policy, self.chunk)
        how: dict[str, Any] = {"chunk": chunk, "seed": seed, "knobs": self.knobs, "overlap": self.overlap}
        return run(own, Trace(load) if isinstance(load, Sequence) else load, self.profile, **how, **more)

    def compare(self, rounds: Sequence[Sequence[Job]], seen: Mapping[str, Sequence[Round]], seed: int) -> Accuracy:
        """Return measured and simulated figures by policy. ``rounds``: jobs of each; ``seen``: measured rounds."""

        def figures(new: Sequence[int], cached: Sequence[int], one: Round) -> dict[str, float]:
            ttft = one["ttft"]
            alone = lone_s(self.profile, np.asarray(new), np.asarray(cached), self.chunk)
            return quantiles(new, ttft) | {
                MEAN: statistics.fmean(ttft),
                SLOWDOWN: float((np.asarray(ttft) / alone).mean()),
                RATE: len(ttft) / one["ended_s"],
                TOKENS: sum(new) / one["ended_s"],
            }

        def simulated(policy: str, i: int) -> dict[str, float]:
            record = self.run(policy, rounds[i], seed + i).record
            ended_s = max(at + ttft for at, ttft in zip(record.at, record.ttft, strict=True))
            return figures(record.new, record.cached, {"ttft": record.ttft, "ended_s": ended_s})

        tokens = [([job.new for job in jobs], [job.cached for job in jobs]) for jobs in rounds]
        return Accuracy(
            Comparison({p: [figures(*at, one) for at, one in zip(tokens, of, strict=True)] for p, of in seen.items()}),
            Comparison({p: [simulated(p, i) for i in range(len(rounds))] for p in seen}),
        )


def measure(
    fleet: Fleet, name: str, jobs: Sequence[Job], seed: int, patience_s: float = PATIENCE_S, route: Route | None = None
) -> Round:
    """Send the jobs to a real server. Raises ConnectionError if a job fails. ``route``: see ``client.replay``."""
    target, bodies = fleet.target(name), fleet.prompts.bodies(jobs, seed)
    return round_of(name, asyncio.run(client.replay(target, jobs, bodies, patience_s, route)))


def round_of(name: str, answers: Sequence[Answer]) -> Round:
    """Return a round of a variant from its answers. Raises ConnectionError if a request failed."""
    ttft = [a.ttft_s for a in answers if a.ttft_s is not None]
    if len(ttft) < len(answers):
        raise ConnectionError(f"{len(answers) - len(ttft)} requests to {name} failed")
    return {"ttft": ttft, "ended_s": max(a.sent_s + t for a, t in zip(answers, ttft, strict=True))}


def quantiles(tokens: Sequence[int], ttft: Sequence[float]) -> dict[str, float]:
    """Return P50 and P90 TTFT of both classes (seconds)."""
    short, times = np.asarray(tokens) <= THRESHOLD, np.asarray(ttft)
    return dict(zip(KEYS, (quantile(t, q) for t in (times[short], times[~short]) for q in (50, 90)), strict=True))


@dataclass
class Accuracy:
    """Measured and simulated figures of one load, by policy and round. Times in seconds."""

    measured: Comparison
    simulated: Comparison

    def table(self, title: str, *, keys: Sequence[str] = (*KEYS, MEAN), note: str = "") -> Table:
        """Return a table of measured and simulated medians over rounds; times in ms."""
        columns = [Column(key, (key,), *FORMS.get(key, (".0f", 1e3))) for key in keys]
        return self.measured.table(title, "", columns, note, beside=self.simulated)

    def ratios(self, name: str, bars: Mapping[str, Bar | None]) -> list[Figure]:
        """Return simulated over measured figures. ``name``: text with {policy} and {key}; ``bars``: bar of each key."""
        return [
            Figure.of(
                name.format(policy=policy, key=key),
                ratio(self.simulated.values(policy, key), self.measured.values(policy, key)), bar,
            )
            for policy in self.measured.rounds
            for key, bar in bars.items()
        ]  # fmt: skip

    def seconds(self, policy: str) -> dict[str, dict[str, list[float]]]:
        """Return measured and simulated values of a policy by figure, for a picture and for the raw data."""
        both = {"measured": self.measured, "simulated": self.simulated}
        return {how: {key: one.values(policy, key) for key in KEYS} for how, one in both.items()}
