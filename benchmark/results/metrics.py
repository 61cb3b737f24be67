"""Figures of one round, and of all rounds of a variant."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from laps_plan.traffic.job import LONG, SHORT
from numpy.typing import NDArray

from benchmark.load import Answer

KINDS = (SHORT, LONG)
QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Slo:
    """Service level objective: TTFT at most ``factor`` times that of a lone prompt with as many new tokens."""

    factor: float
    lone_s: Callable[[int], float]

    def slowdown(self, answer: Answer) -> float:
        """Return TTFT over lone TTFT; infinite for a failed request."""
        return math.inf if answer.ttft_s is None else answer.ttft_s / self.lone_s(answer.job.new)

    def met(self, answer: Answer) -> bool:
        return self.slowdown(answer) <= self.factor


def quantile(values: Sequence[float] | NDArray[Any], q: float) -> float:
    """Return the quantile at ``q`` percent; NaN without values."""
    return float(np.percentile(values, q)) if len(values) else math.nan


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values."""
    return statistics.fmean(values) if values else math.nan


def ttft_ms(answers: Sequence[Answer], kind: str) -> list[float]:
    """Return the TTFTs of the answered requests of one class (ms)."""
    return [1e3 * a.ttft_s for a in answers if a.job.kind == kind and a.ttft_s is not None]


def ttft_paths(*of: int) -> dict[str, tuple[str, ...]]:
    """Return the paths of these TTFT quantiles (ms) in the figures of a round, by their names in tables."""
    return {f"{kind} P{q}": (kind, f"p{q}_ms") for kind in KINDS for q in of}


def quantiles(answers: Sequence[Answer], kind: str) -> dict[str, float]:
    """Return the TTFT quantiles of one class: p50_ms, p90_ms, p99_ms."""
    ttft = ttft_ms(answers, kind)
    return {f"p{q}_ms": quantile(ttft, q) for q in QUANTILES}


def brief(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the TTFT quantiles of both classes, and the numbers of all and of failed requests."""
    failed = sum(a.ttft_s is None for a in answers)
    return {**{kind: quantiles(answers, kind) for kind in KINDS}, "requests": len(answers), "failed": failed}


def by_class(answers: Sequence[Answer], kind: str, slo: Slo) -> dict[str, float]:
    """Return figures of one class: TTFT (ms), slowdown, longest wait (seconds: TTFT beyond the lone one), share within
    the SLO."""
    mine = [a for a in answers if a.job.kind == kind]
    slowdown = [slo.slowdown(a) for a in mine if a.ttft_s is not None]
    wait = [a.ttft_s - slo.lone_s(a.job.new) for a in mine if a.ttft_s is not None]
    return {
        "requests": len(mine),
        **quantiles(answers, kind),
        "slowdown_mean": mean(slowdown),
        "slowdown_p90": quantile(slowdown, 90),
        "longest_wait_s": max(0.0, *wait) if wait else math.nan,
        "goodput": mean([slo.met(a) for a in mine]),
    }


def figures(answers: Sequence[Answer], slo: Slo) -> dict[str, Any]:
    """Return figures of one round, or of several pooled rounds, whose rates have no meaning. ``mean_ms`` and
    ``slowdown_mean`` are those of all requests."""
    ok = [(a, a.ttft_s) for a in answers if a.ttft_s is not None]
    begin = min((a.sent_s for a in answers), default=0.0)
    spent = max(max((a.sent_s + ttft_s for a, ttft_s in ok), default=begin) - begin, 1e-9)
    return {
        **{kind: by_class(answers, kind, slo) for kind in KINDS},
        "mean_ms": mean([1e3 * ttft_s for _, ttft_s in ok]),
        "slowdown_mean": mean([slo.slowdown(a) for a, _ in ok]),
        "requests_per_s": len(ok) / spent,
        "tokens_per_s": sum(a.job.new for a, _ in ok) / spent,
        "goodput": mean([slo.met(a) for a in answers]),
        "failed": len(answers) - len(ok),
        "client_late_p99_ms": quantile([a.late_s * 1e3 for a in answers], 99),
    }


def curve(answers: Sequence[Answer], kind: str) -> list[float]:
    """Return TTFTs (ms) at even steps of the share of requests, for a picture; failed requests are left out."""
    ttft = ttft_ms(answers, kind)
    return [round(float(v), 3) for v in np.quantile(ttft, np.linspace(0.0, 1.0, 201))] if ttft else []
