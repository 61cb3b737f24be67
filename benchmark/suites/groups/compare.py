"""Figures of a group of ranks: of servers, of the simulator on the same arrivals, and one over the other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from laps_plan.profile import Profile
from laps_plan.sim import variants
from laps_plan.traffic.job import LONG, SHORT, THRESHOLD, Job
from laps_plan.traffic.streams import Trace

from benchmark.results import bars
from benchmark.results.bars import Bar
from benchmark.results.metrics import quantile
from benchmark.results.piece import Figure, Piece, Table
from benchmark.results.rounds import ratio
from benchmark.rig.variants import LAPS, SPF
from benchmark.sim.groups import play
from benchmark.suites.groups.loads import Load
from benchmark.suites.groups.servers import CHUNK

KEYS = ("short P90", "mean", "mean slowdown", "long P90")
RATE = "tokens/s"
ALL = (*KEYS, RATE)
WHOLE = variants.Variant(laps={"slice_ms": 0.0})
"""LAPS as ranks of a server have it: their steps run whole."""

Rounds = Mapping[str, Sequence[Mapping[str, float]]]
"""variant -> the figures of each round."""


def figures_of(jobs: Sequence[Job], ttfts: Sequence[float], ended_s: float, profile: Profile) -> dict[str, float]:
    """Return the figures of one round of one server (seconds, and new tokens per second until the last answer)."""
    short = [t for job, t in zip(jobs, ttfts, strict=True) if job.kind == SHORT]
    long = [t for job, t in zip(jobs, ttfts, strict=True) if job.kind == LONG]
    group = profile.group
    assert group is not None
    slowdowns = [t / group.lone_s(job.new, job.cached, CHUNK) for job, t in zip(jobs, ttfts, strict=True)]
    found = quantile(short, 90), statistics.fmean(ttfts), statistics.fmean(slowdowns), quantile(long, 90)
    return {**dict(zip(KEYS, found, strict=True)), RATE: sum(job.new for job in jobs) / ended_s}


def simulated(name: str, load: Load, profile: Profile, jobs: Sequence[Job], seed: int) -> dict[str, float]:
    """Return the figures of one round in the simulator, of the same jobs and ranks."""
    variant, chunk = (WHOLE, CHUNK) if name == LAPS else (variants.Variant(name), load.chunk)
    record = play(profile, Trace(jobs), variant, chunk, seed=seed)[0].record
    seen = [Job(at, new, cached) for at, new, cached in zip(record.at, record.new, record.cached, strict=True)]
    return figures_of(seen, record.ttft, max(a + t for a, t in zip(record.at, record.ttft, strict=True)), profile)


def piece_of(load: Load, seen: Rounds, expected: Rounds, text: str, seed: int, data: Mapping[str, Any]) -> Piece:
    """Return tables and ratios of all rounds; ``expected``: simulated."""
    table = [
        (name, *(f"{_median(seen[name], key):.3g} / {_median(expected[name], key):.3g}" for key in ALL))
        for name in seen
    ]
    judged = dict(zip(KEYS, (*map(Bar, load.bars), bars.NO_MORE), strict=True)) | {RATE: bars.EMULATED_RATE}
    figures = [
        Figure.of(f"{key}, {LAPS} / {SPF}", ratio(*(_values(seen[name], key) for name in (LAPS, SPF))), judged[key])
        for key in ALL
    ]
    for name in seen:
        for key in ALL:
            found = ratio(_values(expected[name], key), _values(seen[name], key))
            figures.append(Figure.of(f"{key}, {name}: simulated / emulated", found, bars.EMULATED))
    note = f"Seconds of the stretched device, emulated / simulated; short: up to {THRESHOLD} new tokens."
    return Piece(
        load.piece,
        "Groups of ranks" if load.name == "mix" else f"Groups of ranks: {load.name}",
        text,
        seed,
        [Table("Groups", ("variant", *ALL), table, note)],
        figures,
        data={"seen": dict(seen), "simulated": dict(expected), **data},
    )


def _values(rounds: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [one[key] for one in rounds]


def _median(rounds: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(_values(rounds, key))
