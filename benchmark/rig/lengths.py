"""Prompt lengths: from a trace, or lognormal where there is none."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path

LMSYS = Path(__file__).resolve().parents[1] / "traces" / "lmsys_lengths.csv.gz"
"""Lengths of 10,000 LMSYS-Chat-1M prompts; see the README beside it."""


def read(path: Path, column: str = "new_tokens") -> list[int]:
    """One column of a gzip CSV (tokens). Raises OSError, KeyError or ValueError."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as f:
        return [int(row[column]) for row in csv.DictReader(f)]


def lognormal(n: int, rng: random.Random, median: float = 20.0, sigma: float = 1.45) -> list[int]:
    """``n`` lengths (tokens) shaped like LMSYS first turns."""
    return [max(1, round(median * rng.lognormvariate(0.0, sigma))) for _ in range(n)]


def short(n: int, rng: random.Random, cap: int = 256, trace: Path = LMSYS) -> tuple[list[int], str]:
    """``n`` lengths of at most ``cap`` tokens in random order, and their source in words."""
    if trace.exists():
        pool, source = read(trace), f"{trace.name}, capped at {cap} tokens"
    else:
        pool, source = lognormal(n, rng), f"lognormal, median 20 tokens, capped at {cap}"
    return [max(1, min(cap, length)) for length in rng.choices(pool, k=n)], source
