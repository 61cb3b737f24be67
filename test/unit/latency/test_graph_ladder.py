"""The ladder of prefill graphs: row counts, admission, padding, and the table."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.ladder import MOST, MOST_ROWS, MULTIPLE, PADDING, Ladder, row_counts

sizes = st.lists(st.integers(1, 300), min_size=1, max_size=6)
strategies = st.sampled_from(["latency", "memory"])


def ladder(tokens: int = MOST_ROWS, length: int = 32768, slots: int = 4096, multiple: int = 1, **knobs: Any) -> Ladder:
    made = Ladder.of(LapsConfig(**knobs), tokens=tokens, length=length, slots=slots, multiple=multiple)
    assert made is not None
    return made


def test_default_flags_give_expected_row_counts() -> None:
    assert ladder(graph_strategy="memory").rows == (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    fine = ladder()
    assert fine.rows[:12] == (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
    assert fine.rows[-5:] == (1024, 1280, 1536, 1792, 2048)
    assert len(fine.rows) == 28
    assert (fine.length, fine.slots) == (256, 64)


def test_row_counts_need_not_be_powers_of_two() -> None:
    assert row_counts([100], [1, 3], strategy="memory", most=2048) == (104, 304)
    fine = row_counts([100], [1, 3], strategy="latency", most=2048)
    assert {104, 304, 8, 96, 112, 160, 256} <= set(fine)
    assert row_counts([100], [1, 3], strategy="memory", most=250) == (104, 248)
    assert row_counts([100], [], strategy="memory", most=250) == ()
    assert row_counts([100], [1], strategy="latency", most=7) == ()
    assert row_counts([64], [16], strategy="latency", most=100, multiple=24) == (24, 48, 72, 96)


def test_too_many_row_counts_are_thinned_to_ladder_steps() -> None:
    many = row_counts(range(1, 300), range(1, 65), strategy="memory", most=2048)
    assert many == ladder().rows
    exact = row_counts([8], range(1, MOST + 1), strategy="memory", most=2048)
    assert exact == tuple(range(8, 8 * MOST + 1, 8))
    assert len(row_counts([8], range(1, MOST + 2), strategy="memory", most=2048)) < MOST


@given(sizes, sizes, strategies, st.integers(8, 4096))
def test_row_counts_are_aligned_and_cover_largest_product(
    lengths: list[int], batches: list[int], how: str, most: int
) -> None:
    rows = row_counts(lengths, batches, strategy=how, most=most)
    top = max(lengths) * max(batches)
    assert list(rows) == sorted(set(rows))
    assert all(n % MULTIPLE == 0 and 0 < n <= most for n in rows)
    assert rows[-1] >= min(top, most - most % MULTIPLE)
    assert rows[-1] < top + MULTIPLE


@given(sizes, sizes, st.integers(1, 5000))
def test_fine_ladder_pads_at_most_one_quarter(lengths: list[int], batches: list[int], tokens: int) -> None:
    made = ladder(graph_lengths=lengths, graph_batches=batches, tokens=1 << 20)
    found = made.fitting_rows(tokens)
    if tokens > made.rows[-1]:
        assert found is None
    elif found is None:
        assert tokens < MULTIPLE / PADDING
    else:
        assert tokens <= found
        assert found - tokens < max(MULTIPLE, found / 4)


def test_padding_at_most_doubles_rows() -> None:
    coarse = ladder(graph_strategy="memory")
    assert [coarse.fitting_rows(n) for n in (3, 4, 8, 9, 17, 1024, 1025, 2048, 2049)] == [
        None, 8, 8, 16, 32, 1024, 2048, 2048, None,
    ]  # fmt: skip
    sparse = ladder(graph_strategy="memory", graph_lengths=[8, 256], graph_batches=[1])
    assert [sparse.fitting_rows(n) for n in (8, 9, 127, 128, 256)] == [8, None, None, 256, 256]


def test_server_limits_bound_ladder() -> None:
    small = ladder(tokens=300, length=100, slots=10)
    assert (small.length, small.slots, small.rows[-1]) == (64, 8, 296)
    assert ladder(length=20).length == 16
    assert (ladder(length=64).length, ladder(slots=8).slots) == (64, 8)
    assert all(n % 24 == 0 for n in ladder(multiple=6).rows)
    config = LapsConfig()
    assert Ladder.of(config, tokens=7, length=100, slots=10) is None
    assert Ladder.of(config, tokens=2048, length=7, slots=10) is None
    assert Ladder.of(config, tokens=2048, length=100, slots=0) is None


def test_limits_admit_batches_and_measured_times_choose_graph() -> None:
    made = ladder(graph_lengths=[32], graph_batches=[4]).with_times({8: (1.0, 2.0), 16: (2.0, 1.0), 24: (1.0, 1.0)})
    assert made.faster == {16}
    assert [made.admits(new) for new in ([32], [33], [1, 1, 1, 1], [1] * 5, [])] == [True, False, True, False, False]
    assert made.choose([4, 4]) == (None, "slower")
    assert made.choose([4, 5]) == (16, "faster")
    assert made.choose([17]) == (None, "slower")
    assert made.choose([3]) == (None, "no-graph")


@given(sizes, sizes, strategies)
def test_timing_sample_is_batch_served_by_its_row_count(lengths: list[int], batches: list[int], how: str) -> None:
    made = ladder(graph_lengths=lengths, graph_batches=batches, graph_strategy=how)
    below = 0
    for rows in made.rows:
        new = made.sample(rows)
        assert made.admits(new)
        assert len(new) == math.ceil(sum(new) / made.length)
        assert max(new) - min(new) <= 1
        if made.length * made.slots >= rows:
            assert made.fitting_rows(sum(new)) == rows
            assert sum(new) == (max(below + 1, rows // PADDING) + rows) // 2
        below = rows
