"""Arrival times and lengths of public traces; sources and licences in ``benchmark/traces/README.md``."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "traces"


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    at_s: float
    new: int
    cached: int


@cache
def read(name: str) -> tuple[Row, ...]:
    """All rows, in order of arrival; without arrival times in the file they are all 0. Raises OSError."""
    with gzip.open(FOLDER / f"{name}.csv.gz", "rt", encoding="utf-8", newline="") as f:
        return tuple(
            Row(float(r.get("arrival_ms") or 0) / 1e3, int(r["new_tokens"]), int(r.get("cached_tokens") or 0))
            for r in csv.DictReader(f)
        )


def shrink(rows: Sequence[Row], longest: int) -> tuple[float, list[Row]]:
    """(factor, rows): lengths scaled so that the 99th percentile of whole prompts is at most ``longest`` tokens.

    What is longer even then is cut to ``longest``: one prompt in a hundred or fewer.
    """
    factor = min(1.0, longest / float(np.percentile([r.new + r.cached for r in rows], 99)))
    scaled = []
    for row in rows:
        new = min(longest, max(1, round(row.new * factor)))
        scaled.append(replace(row, new=new, cached=min(longest - new, round(row.cached * factor))))
    return factor, scaled
