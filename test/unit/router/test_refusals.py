"""Recognition of requests for several samples of a prompt, in every notation."""

from __future__ import annotations

import math
from typing import Any

import pytest
from laps_core.refusals import several_samples


@pytest.mark.parametrize("n", [2, 2.0, 1.5, "3", " 2 ", "inf", 10**400, math.inf])
def test_n_above_one_means_several_samples(n: Any) -> None:
    assert several_samples({"n": n})


@pytest.mark.parametrize("n", [None, 1, 1.0, 0, -3, True, "1", "many", "", "nan", math.nan, [2], {"n": 2}])
def test_n_up_to_one_or_invalid_means_one_sample(n: Any) -> None:
    assert not several_samples({"n": n})


@pytest.mark.parametrize("params", [None, {}, [], [{"n": 2}], 5, "n", {"n": 2, "beam_width": 4}])
def test_missing_n_or_beam_search_means_one_sample(params: Any) -> None:
    assert not several_samples(params)


def test_beam_width_of_one_is_no_beam_search() -> None:
    assert several_samples({"n": 2, "beam_width": 1})
    assert several_samples({"n": 2, "beam_width": None})
