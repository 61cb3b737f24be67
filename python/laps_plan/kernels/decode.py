"""Cost of decode steps, fitted to the times of generation kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from laps_plan.decode import DecodeCost

Generation = Callable[[int, int], dict[str, float]]
"""Seconds of each kind of kernel in a decode step of (streams, tokens of context of each stream)."""
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 1024, 4096, 16384)
MOST = 1 << 20
"""Maximum tokens of context in a step: about the capacity of a device's memory."""


class DecodeSample(NamedTuple):
    """A decode step with its looked-up time."""

    streams: int
    context: int
    """Total tokens of context of all streams."""
    rows_s: float
    """Seconds of all kernels but attention."""
    attention_s: float


def samples(generation: Generation) -> list[DecodeSample]:
    """Return every step of the grid with its time."""
    return [_sample(n, each, generation(n, each)) for n in STREAMS for each in CONTEXTS if n * each <= MOST]


def _sample(n: int, each: int, kernels: dict[str, float]) -> DecodeSample:
    attention_s = sum(s for name, s in kernels.items() if name.endswith("attention"))
    return DecodeSample(n, n * each, sum(kernels.values()) - attention_s, attention_s)


def cost(rows: Sequence[DecodeSample]) -> DecodeCost:
    """Return the cost fitted to ``rows``. Attention is a line over streams and tokens of context, by least relative
    squares. All other time is kept as looked up, but never falls with more streams."""
    terms = np.array([(1.0, r.streams, r.context) for r in rows])
    weight = 1.0 / np.array([r.attention_s for r in rows])
    start, each, context = nnls(terms * weight[:, None], np.ones(len(rows)))[0].tolist()
    rest: dict[int, float] = {}
    for r in rows:
        rest[r.streams] = max(r.rows_s, *rest.values()) if rest else r.rows_s
    known = sorted(rest)
    return DecodeCost(
        streams=known, seconds=[float(f"{rest[n] + start + each * n:.5g}") for n in known],
        context=float(f"{context:.5g}"),
    )  # fmt: skip
