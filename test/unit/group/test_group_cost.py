"""Time of a group's step, and the largest work within a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groups import CHUNK, COST, make_prompt
from hypothesis import example, given, settings
from hypothesis import strategies as st

HISTORY = st.integers(0, 131_072)


def test_step_time_is_slowest_dp_rank_plus_experts() -> None:
    shapes = [COST.shape([(4096, 0)]), COST.shape([(1024, 0)]), COST.shape([]), COST.shape([(64, 0)])]
    own = COST.own_s(4096, COST.attention_s(4096, 0))
    assert COST.seconds(shapes) == pytest.approx(0.012 + own + 19e-6 * 5184)


def test_small_step_takes_minimum_time() -> None:
    assert COST.seconds([COST.shape([(8, 0)])] * 4) == pytest.approx(COST.step_s)
    assert COST.own_s(0, 0.0) == 0.0


def test_padded_experts_count_largest_dp_rank_for_all() -> None:
    assert replace(COST, padded=True).experts_s([4096, 0, 0, 0]) == COST.experts_s([4096] * 4)


def test_long_history_is_not_unpacked_for_few_tokens() -> None:
    assert not COST.unpacks(64, 100_000)
    assert COST.unpacks(2048, 100_000)
    assert replace(COST, absorbed=None).unpacks(64, 100_000)
    shape = COST.shape([(64, 100_000), (2048, 100_000)])
    both = COST.attention_s(64, 100_000) + COST.attention_s(2048, 100_000)
    assert COST.shape_s(shape) == pytest.approx(both)
    assert shape.history == 100_000


@given(left=st.floats(0.001, 2.0), history=HISTORY, absorbs=st.booleans())
@example(left=0.001, history=0, absorbs=False)
def test_most_tokens_is_largest_amount_within_time_left(left: float, history: int, absorbs: bool) -> None:
    cost = COST if absorbs else replace(COST, absorbed=None)

    def takes(new: int) -> float:
        return cost.token * new + cost.attention_s(new, history)

    fits = cost.most_tokens(left, history)
    assert fits % 64 == 0
    assert fits == 0 or takes(fits) <= left * (1 + 1e-9)
    assert takes(fits + 128) > left


@settings(max_examples=50)
@given(new=st.integers(1, 131_072), history=HISTORY)
def test_lone_time_covers_work_and_fixed_time_per_chunk(new: int, history: int) -> None:
    lone = COST.lone_s(new, history, CHUNK)
    steps = -(-new // CHUNK)
    assert lone >= steps * COST.fixed + COST.useful_s(new, history) * (1 - 1e-9)
    assert lone >= COST.step_s * (1 - 1e-9)


def test_prompt_keeps_weight_while_its_work_shrinks() -> None:
    whole = make_prompt(20_000, 1000)
    rest = whole.after(COST, 19_990)
    assert (rest.tokens, rest.history, rest.started) == (10, 20_990, True)
    assert rest.weight == whole.weight
    assert whole.long
    assert not rest.long
