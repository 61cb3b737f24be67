"""Figures of one simulation, and differences between two simulations beyond chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from laps_core.config import LapsConfig
from scipy.special import stdtrit

from laps_plan.plan.setup import Objectives
from laps_plan.sim.metrics import Floats, Outcome, lone_s, quantiles
from laps_plan.traffic.job import LONG, SHORT, THRESHOLD, Job

PARTS = 8
"""Parts of the whole traffic, from which confidence intervals are computed."""
WARM = 0.1
"""First share of a simulation, which is not counted because the servers start idle."""
SURE = 0.95
"""Confidence of the intervals."""
assert LapsConfig().length_threshold == THRESHOLD


@dataclass
class Sample:
    """Answered requests of a simulation in order of arrival, as columns. Times in seconds, lengths in tokens."""

    at: Floats
    ttft: Floats
    new: Floats
    lone: Floats
    """TTFT of each request alone on an idle server."""

    @property
    def mean_s(self) -> float:
        """Mean TTFT (seconds)."""
        return float(self.ttft.mean())

    @classmethod
    def of(cls, outcome: Outcome) -> Sample:
        """Return all answered requests of a simulation."""
        record = outcome.record
        at, ttft, new, cached = (np.array(c, dtype=float) for c in (record.at, record.ttft, record.new, record.cached))
        order = np.argsort(at, kind="stable")
        alone = lone_s(outcome.profile, new, cached, outcome.chunk)
        return cls(at[order], ttft[order], new[order], alone[order])

    def since(self, begin_s: float, end_s: float = math.inf) -> Sample:
        """Return the requests that arrived from ``begin_s`` on and before ``end_s``."""
        mask = (self.at >= begin_s) & (self.at < end_s)
        return Sample(self.at[mask], self.ttft[mask], self.new[mask], self.lone[mask])

    def parts(self, n: int) -> list[Sample]:
        """Return the sample cut into ``n`` parts of as many requests, the same requests for every policy."""
        parts = np.array_split(np.lexsort((self.new, self.at)), n)
        return [Sample(self.at[part], self.ttft[part], self.new[part], self.lone[part]) for part in parts]


@dataclass
class Figures:
    """Figures of one sample; times in seconds. A class without requests has no quantiles."""

    requests: int
    in_time: float
    """Share of all requests that are in time (0..1); NaN without requests."""
    mean_s: float
    slowdown: float
    """Mean ratio of TTFT to TTFT alone."""
    short: dict[str, float]
    """p50, p90, p99."""
    long: dict[str, float]

    @classmethod
    def of(cls, sample: Sample, objectives: Objectives) -> Figures:
        if not len(sample.ttft):
            return cls(0, math.nan, math.nan, math.nan, {}, {})
        short = sample.new <= THRESHOLD
        in_time = sample.ttft <= np.where(short, objectives.short_s, objectives.long_s)
        return cls(
            len(sample.ttft),
            float(in_time.mean()),
            float(sample.ttft.mean()),
            float((sample.ttft / sample.lone).mean()),
            quantiles(sample.ttft[short]),
            quantiles(sample.ttft[~short]),
        )

    def value(self, name: str) -> float:
        """Return one of COMPARED; NaN if the sample does not have it."""
        if name == "mean TTFT":
            return self.mean_s
        kind = self.short if name.startswith(SHORT) else self.long
        return kind.get("p90", math.nan)


COMPARED = (f"{SHORT} P90", f"{LONG} P90", "mean TTFT")
"""Figures whose ratios are reported."""


def warm_s(jobs: Sequence[Job]) -> float:
    """Return the time from which requests are counted (seconds)."""
    return jobs[0].at_s + WARM * (jobs[-1].at_s - jobs[0].at_s)


@dataclass(frozen=True)
class Between:
    """A figure with its confidence interval (SURE)."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @classmethod
    def of(cls, values: Sequence[float]) -> Between | None:
        """Return the mean of independent ``values`` with its interval; None with fewer than two finite values."""
        known = [v for v in values if math.isfinite(v)]
        if len(known) < 2:
            return None
        middle = float(np.mean(known))
        off = float(stdtrit(len(known) - 1, 0.5 + SURE / 2) * np.std(known, ddof=1) / math.sqrt(len(known)))
        return cls(middle, middle - off, middle + off)


@dataclass(frozen=True)
class Change:
    """Ratios of the figures of one setup to those of another, on the same stretches of traffic."""

    ratios: dict[str, Between]
    """By name in COMPARED, for figures that both setups have; below 1 is faster."""
    in_time: Between | None
    """Difference of the shares in time (1 = all requests)."""

    @classmethod
    def of(cls, these: Sequence[Figures], those: Sequence[Figures]) -> Change:
        """Return the ratios of ``these`` to ``those``, stretch by stretch."""
        pairs = list(zip(these, those, strict=True))
        ratios: dict[str, Between] = {}
        for name in COMPARED:
            both = [(a.value(name), b.value(name)) for a, b in pairs]
            logs = Between.of([math.log(a / b) for a, b in both if a > 0.0 and b > 0.0])
            if logs is not None:
                ratios[name] = Between(*(math.exp(x) for x in (logs.middle, logs.low, logs.high)))
        return cls(ratios, Between.of([a.in_time - b.in_time for a, b in pairs]))

    def as_dict(self) -> dict[str, Any]:
        """Return [middle, low, high] of each figure (JSON-ready)."""
        shown = {**self.ratios, **({} if self.in_time is None else {"in time": self.in_time})}
        return {name: [b.middle, b.low, b.high] for name, b in shown.items()}
