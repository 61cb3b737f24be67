"""Figures from what clients saw and servers tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmark.rig.load import Seen

QUANTILES = (50, 90, 99)


def ttft_ms(seen: Iterable[Seen], kind: str) -> list[float]:
    """Times to first token (ms) of the requests of one kind that got one."""
    return [s.ttft_s * 1000 for s in seen if s.kind == kind and s.ttft_s is not None and s.error is None]


def busy_s(status: Mapping[str, Any]) -> float:
    """Device time of both classes so far, from /laps_status (seconds)."""
    return sum(float(of["busy_s"]) for of in status["totals"].values())


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50_ms, p90_ms, p99_ms; None where there is no value."""
    if not values:
        return {f"p{q}_ms": None for q in QUANTILES}
    return {f"p{q}_ms": round(float(v), 2) for q, v in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}


def failed(seen: Iterable[Seen]) -> int:
    """Requests without a first token, or with an error."""
    return sum(1 for s in seen if s.error is not None)
