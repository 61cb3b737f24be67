"""Non-negative least squares, robust to a few outliers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Array = npt.NDArray[np.float64]

_COLLINEAR = 0.02
"""Least sine of the angle between a column and the span of the columns before it; other columns are left out."""
_ROUNDS = 20
_STEPS = 200
"""Iteration limit of one solution, many times the iterations that five columns need."""
_HUBER = 0.5
"""Residuals beyond this many standard deviations count linearly. The value is small, so that the fit is nearly a fit of
the median: other work often delays steps, which puts the mean above most times."""


def independent(a: Array) -> list[int]:
    """Return the indices of the columns of `a` (rows, columns) that are independent of the columns before them."""
    unit = a / np.maximum(np.linalg.norm(a, axis=0), np.finfo(float).tiny)
    keep: list[int] = []
    for j in range(a.shape[1]):
        known = unit[:, keep]
        rest = unit[:, j] - known @ np.linalg.lstsq(known, unit[:, j], rcond=None)[0]
        if np.linalg.norm(rest) > _COLLINEAR:
            keep.append(j)
    return keep


def robust_nnls(features: Array, seconds: Array) -> Array:
    """Return non-negative coefficients with a small *relative* error, robust to outliers.

    features: (rows, columns), most essential column first; seconds: (rows,), all > 0. Returns (columns,), with 0 for a
    column that the rows cannot distinguish from the columns before it. Huber weights on the relative residual limit the
    influence of a step that a garbage collection made long. Raises RuntimeError if no solution is found.
    """
    scale = seconds
    trust = np.ones_like(seconds)
    columns = independent(features / scale[:, None])
    used = features[:, columns]
    found = np.zeros(used.shape[1])
    for _ in range(_ROUNDS):
        weight = np.sqrt(trust) / scale
        rows = used * weight[:, None]
        norms = np.linalg.norm(rows, axis=0)
        before, found = found, nnls(rows / norms, seconds * weight, maxiter=_STEPS)[0] / norms
        predicted = used @ found
        # Relative to the prediction, not to the measurement, so that noise does not pull the fit below the median.
        scale = np.maximum(predicted, 0.1 * seconds)
        residual = np.abs(seconds - predicted) / scale
        limit = _HUBER * max(1.4826 * float(np.median(residual)), 1e-6)
        trust = np.minimum(1.0, limit / np.maximum(residual, 1e-12))
        if np.allclose(found, before, rtol=1e-3, atol=0.0):
            break
    result = np.zeros(features.shape[1])
    result[columns] = found
    return result
