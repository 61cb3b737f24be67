"""Non-negative least squares: zero terms, redundant columns, outliers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.latency.nnls import independent, robust_nnls


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_robust_nnls_recovers_exact_coefficients_with_zeros(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.uniform(1.0, 100.0, size=(60, columns))
    true = np.where(rng.random(columns) < 0.4, 0.0, rng.uniform(0.1, 1.0, size=columns))
    true[0] = 1.0
    assert robust_nnls(features, features @ true) == pytest.approx(true, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_robust_nnls_coefficients_are_finite_and_non_negative(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    found = robust_nnls(rng.uniform(0.0, 10.0, size=(40, columns)), rng.lognormal(0.0, 2.0, size=40))
    assert np.isfinite(found).all()
    assert (found >= 0.0).all()


def test_robust_nnls_gives_redundant_and_zero_columns_zero() -> None:
    first = np.linspace(1.0, 50.0, 30)
    found = robust_nnls(np.column_stack((first, 2.0 * first, np.zeros(30))), 3.0 * first)
    assert found == pytest.approx([3.0, 0.0, 0.0])


def test_independent_columns_are_chosen_by_angle_not_scale() -> None:
    first, zigzag = np.linspace(1.0, 2.0, 30), np.tile([1.0, -1.0], 15)
    for scale in (1e-6, 1.0, 1e6):
        other = np.column_stack(
            (first, scale * (first + 0.1 * zigzag), scale * zigzag, scale * (first + 0.01 * zigzag))
        )
        assert independent(other) == [0, 1]
        assert independent(other[:, [0, 3, 2]]) == [0, 2]


def test_robust_nnls_separates_columns_by_few_small_rows() -> None:
    both = np.arange(100.0, 128.0)
    features = np.vstack((np.column_stack((both, both)), [(1.0, 2.0), (2.0, 1.0)]))
    assert robust_nnls(features, features @ [1.0, 3.0]) == pytest.approx([1.0, 3.0])
