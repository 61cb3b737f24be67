"""Fit of the latency model's terms to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from laps_core.latency.nnls import robust_nnls
from laps_core.latency.step import Coefficients, StepSample

_FLAT = (32, 64, 96, 128, 192, 256, 384, 512)
"""Candidates for the bend, below which a step's time is flat (tokens). Measured kernels bend between 64 and 256."""
_BENDS = 0.85
"""A fit with a bend is used only if its error is at most this share of the error without a bend."""

Array = npt.NDArray[np.float64]


def fit(samples: Sequence[StepSample]) -> Coefficients:
    """Return the model with the least relative error over these steps. Raises RuntimeError if no solution is found.

    A plain fit of each form decides whether compute and memory time add up, or the larger of both counts. A robust fit
    of that form gives the terms.
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
    """Return the mean relative error, with outliers clipped at 50%."""
    rows = table / seconds[:, None]
    norms = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(float).tiny)
    found = nnls(rows / norms, np.ones(len(rows)))[0] / norms
    return float(np.minimum(np.abs(rows @ found - 1.0), 0.5).mean())
