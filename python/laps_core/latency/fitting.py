"""The terms of the latency model from measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from laps_core.latency.nnls import robust_nnls
from laps_core.latency.step import Coefficients, StepSample

_FLAT = (32, 64, 96, 128, 192, 256, 384, 512)
"""Where the bend may be (tokens). Grids of measured kernels have it between 64 and 256."""
_BENDS = 0.85
"""With a bend the mean error must be less than this much of the error without, or there is none."""

Array = npt.NDArray[np.float64]


def fit(samples: Sequence[StepSample]) -> Coefficients:
    """The model with the least relative error over these steps. Raises RuntimeError where no solution is found.

    Whether its two times add up or the larger counts is told by a plain fit of each; the terms by a robust one.
    """
    seconds = np.array([s.seconds for s in samples])
    errors = {flat: _error(_table(samples, flat), seconds) for flat in (0, *_FLAT)}
    flat = min(errors, key=errors.__getitem__)
    if errors[flat] > _BENDS * errors[0]:
        flat = 0
    fixed, linear, alpha, gamma_r, per_request = robust_nnls(_table(samples, flat), seconds).tolist()
    return Coefficients(alpha, linear, gamma_r, per_request, fixed, flat if linear else 0)


def _table(samples: Sequence[StepSample], flat: int) -> Array:
    shapes = [s.shape for s in samples]
    return np.array([(1.0, max(s.tokens, flat), s.attention, s.history, s.requests) for s in shapes])


def _error(table: Array, seconds: Array) -> float:
    """Mean relative error, one wild step counting as little as a middling one."""
    rows = table / seconds[:, None]
    norms = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(float).tiny)
    found = nnls(rows / norms, np.ones(len(rows)))[0] / norms
    return float(np.minimum(np.abs(rows @ found - 1.0), 0.5).mean())
