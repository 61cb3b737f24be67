"""Recognition of requests for several samples of a prompt, in every notation."""

from __future__ import annotations

import math
from typing import Any

import pytest
from laps_core.refusals import several_samples


@pytest.mark.parametrize("n", [2, 2.0, 1.5, "3", " 2 ", "inf", 10**400, math.inf])
def test_more_than_one_is_several(n: Any) -> None:
    assert several_samples({"n": n})


@pytest.mark.parametrize("n", [None, 1, 1.0, 0, -3, True, "1", "many", "", "nan", math.nan, [2], {"n": 2}])
def test_one_or_no_number_is_not(n: Any) -> None:
    assert not several_samples({"n": n})


@pytest.mark.parametrize("params", [None, {}, [], [{"n": 2}], 5, "n", {"n": 2, "beam_width": 4}])
def test_what_names_no_samples_has_one(params: Any) -> None:
    assert not several_samples(params)


def test_beams_of_one_are_no_search() -> None:
    assert several_samples({"n": 2, "beam_width": 1})
    assert several_samples({"n": 2, "beam_width": None})
