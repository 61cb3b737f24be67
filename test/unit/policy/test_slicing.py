"""Pauses of a pass in slices, for operators and blocks of rows of any size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.slicing import MIN_ROWS, Cut, Even, Operator, pairs, slices

costs = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=60)


@given(costs, st.floats(0.01, 50.0))
def test_slice_exceeds_limit_only_for_single_long_operator(sizes: list[float], each: float) -> None:
    cut, found = Cut(each), [0.0]
    for size in sizes:
        if cut.count_operator(size):
            found.append(0.0)
        found[-1] += size
    assert sum(found) == pytest.approx(cut.done) == pytest.approx(sum(sizes))
    assert all(s <= each * 1.00001 or s in sizes for s in found)
    assert all(a + b > each for a, b in pairwise(found)), "none that the next one had room for"


@given(st.integers(1, 9), st.integers(1, 20_000), st.integers(0, 50_000), st.floats(0.05, 3.0))
def test_slices_of_pass_add_up_and_stay_within_limit(layers: int, new: int, history: int, each: float) -> None:
    attended = pairs([(new, history)])
    ops = [Operator(1e-4), Operator(0.0, 1e-9), Operator(5e-5), Operator(6e-4, divisible=True)]
    found = list(slices(ops, layers, new, attended, each))
    total = layers * sum(op.cost(new, attended) for op in ops)
    assert sum(found) == pytest.approx(total)
    least = max(ops[0].cost(new, 0), ops[1].cost(0, attended), ops[2].cost(new, 0))
    rows = max(1, new // MIN_ROWS)
    assert max(found) <= max(each, least, ops[3].cost(new, 0) / rows) * 1.00001


def test_row_blocks_have_minimum_size() -> None:
    cut = Cut(1.0)
    assert [cut.blocks(cost, 8192) for cost in (0.5, 1.0, 1.1, 4.0, 100.0)] == [1, 1, 2, 4, 8]
    assert [cut.blocks(100.0, rows) for rows in (1, 1023, 2047, 2048)] == [1, 1, 1, 2]


def test_pairs_count_attended_tokens() -> None:
    assert pairs([(3, 0)]) == 6
    assert pairs([(2, 10), (1, 0)]) == 20 + 3 + 1


@given(st.integers(1, 100), st.data())
def test_even_slices_differ_by_at_most_one_layer(layers: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, layers))
    even = Even(layers, parts)
    pauses = [i for i in range(layers) if even.count_layer()]
    assert len(pauses) == parts - 1
    assert even.done == layers
    sizes = [b - a for a, b in pairwise([0, *pauses, layers])]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("parts", [0, 5])
def test_invalid_number_of_slices_is_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=f"{parts} slices of 4 layers"):
        Even(4, parts)


def test_encoder_layers_fill_slices_without_counting_as_done() -> None:
    cut = Cut(10.0)
    assert [cut.count_encoder_layer(6.0) for _ in range(3)] == [False, True, True]
    assert cut.done == 0.0
    assert cut.count_operator(4.0) is False, "it fits beside the last of them"
    assert cut.count_operator(1.0) is True
    assert cut.done == 5.0
