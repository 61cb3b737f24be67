"""Arrival times and lengths of public traces; sources and licences in ``python/laps_plan/traces/README.md``."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from laps_plan.traffic.job import Job

FOLDER = Path(__file__).resolve().parents[1] / "traces"


def load(path: Path) -> list[Job]:
    """Return the rows of a gzip CSV with ``arrival_ms,new_tokens,cached_tokens,output_tokens``; only the second is
    needed. They are in order of arrival, or of the file if it has no times (all 0).

    Raises OSError, KeyError or ValueError.
    """
    with gzip.open(path, "rt", encoding="utf-8", newline="") as f:
        jobs = [
            Job(
                float(r.get("arrival_ms") or 0) / 1e3,
                max(1, int(r["new_tokens"])),
                int(r.get("cached_tokens") or 0),
                output=max(1, int(r.get("output_tokens") or 0)),
            )
            for r in csv.DictReader(f)
        ]
    return sorted(jobs, key=lambda job: (job.at_s, job.new, job.cached)) if any(job.at_s for job in jobs) else jobs


@cache
def read(name: str) -> tuple[Job, ...]:
    """Return all rows of a trace in FOLDER. Raises OSError."""
    return tuple(load(FOLDER / f"{name}.csv.gz"))


def shrink(rows: Sequence[Job], longest: int) -> tuple[float, list[Job]]:
    """Return (factor, rows): lengths scaled so that the 99th percentile of whole prompts is at most ``longest`` tokens.

    Prompts that are still longer, at most one in a hundred, are cut to ``longest``.
    """
    factor = min(1.0, longest / float(np.quantile([r.new + r.cached for r in rows], 0.99)))
    scaled = []
    for row in rows:
        new = min(longest, max(1, round(row.new * factor)))
        scaled.append(replace(row, new=new, cached=min(longest - new, round(row.cached * factor))))
    return factor, scaled
