"""The (L, B, N) grid: covering, padding bound, conservation, budget, learning and replacement."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.buckets import (
    STRATEGIES,
    Batch,
    Buckets,
    Budget,
    Cell,
    Demand,
    Gains,
    allowed,
    expected_batches,
    grid,
    ladder,
    rank,
)

LENGTHS, BATCHES = (8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64)

pads = st.floats(0.05, 0.5)
granules = st.sampled_from([1, 4, 8, 16])
batches = st.lists(st.integers(1, 256), min_size=1, max_size=64).map(Batch.of)
axes = st.tuples(
    st.lists(st.integers(1, 300), min_size=1, max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=5)
)


def linear(requests: Sequence[tuple[int, int]]) -> float:
    return 0.004 + sum(1e-5 * new + 1e-8 * new * (new + 2 * old) for new, old in requests)


# -- the grid


@given(st.integers(1, 5000), pads, granules)
def test_each_total_has_a_level_within_the_bound(high: int, pad_max: float, granule: int) -> None:
    levels = ladder(high, pad_max=pad_max, granule=granule)
    assert levels == sorted(set(levels))
    assert all(n % granule == 0 for n in levels)
    below = 0
    for level in levels:
        assert level - (below + 1) <= allowed(level, pad_max=pad_max, granule=granule)
        below = level
    assert levels[-1] >= high


@given(batches, pads, granules)
@settings(deadline=None)
def test_the_full_grid_serves_every_batch_within_the_bound(batch: Batch, pad_max: float, granule: int) -> None:
    cells = grid(LENGTHS, BATCHES, pad_max=pad_max, granule=granule, max_tokens=256 * 64)
    cell = Buckets(cells, pad_max=pad_max, granule=granule).nearest(batch)
    assert cell is not None
    assert cell.covers(batch)
    assert 0 <= cell.tokens - batch.tokens <= allowed(cell.tokens, pad_max=pad_max, granule=granule)


@given(axes, st.integers(1, 2000))
def test_every_cell_is_needed_by_some_batch(axes: tuple[list[int], list[int]], max_tokens: int) -> None:
    lengths, sizes = axes
    for cell in grid(lengths, sizes, pad_max=0.25, max_tokens=max_tokens):
        shorter = max((v for v in lengths if v < cell.length), default=0)
        fewer = max((v for v in sizes if v < cell.batch), default=0)
        least = shorter + 1 + fewer
        assert least <= cell.tokens
        assert cell.tokens < cell.length * cell.batch + 8
        assert cell.tokens < max_tokens + 8


def test_an_empty_axis_makes_an_empty_grid() -> None:
    assert grid([], [1], pad_max=0.25, max_tokens=64) == []
    assert Buckets([], pad_max=0.25).nearest(Batch.of([4])) is None


# -- nearest


@given(batches, st.lists(st.sampled_from(grid(LENGTHS, BATCHES, pad_max=0.25, max_tokens=2048)), max_size=30))
def test_nearest_covers_and_is_minimal(batch: Batch, some: list[Cell]) -> None:
    buckets = Buckets(some, pad_max=0.25)
    fits = [
        c for c in some if c.covers(batch) and c.tokens - batch.tokens <= allowed(c.tokens, pad_max=0.25, granule=8)
    ]
    assert buckets.nearest(batch) == min(fits, default=None)

    def backwards(cell: Cell, _: Batch) -> float:
        return -float(cell.tokens)

    best = buckets.nearest(batch, backwards)
    if fits:
        assert best is not None
        assert best.tokens == max(c.tokens for c in fits)
    else:
        assert best is None


def test_nearest_puts_cells_of_unknown_time_last() -> None:
    small, large = Cell(8, 8, 1), Cell(8, 8, 4)
    buckets = Buckets([small, large], pad_max=0.25)
    assert buckets.nearest(Batch.of([7]), lambda c, _: None if c == small else 1.0) == large


def test_an_empty_batch_has_no_cell() -> None:
    assert Buckets([Cell(8, 8, 1)], pad_max=0.25).nearest(Batch.of([])) is None


# -- split


@given(batches, st.sampled_from(STRATEGIES), st.integers(0, 40), st.booleans())
@settings(deadline=None)
def test_split_conserves_requests(batch: Batch, strategy: str, skip: int, timed: bool) -> None:
    cells = grid(LENGTHS, BATCHES, pad_max=0.25, max_tokens=2048)[skip::7]
    buckets = Buckets(cells, pad_max=0.25)
    time = (lambda c, b: linear(b.padded(c))) if timed else None
    split = buckets.split(batch, strategy, time=time, stock=linear if timed else None)
    assert sorted(itertools.chain.from_iterable(p.members for p in split.parts)) == list(range(batch.count))
    assert sum(p.tokens for p in split.parts) == batch.tokens
    for part in split.parts:
        if part.cell:
            assert part.cell.covers(Batch(tuple(batch.requests[m] for m in part.members)))
    assert split.waste == sum(p.waste for p in split.parts) >= 0
    assert 0.0 <= split.share <= 1.0


@given(batches)
@settings(deadline=None)
def test_each_strategy_is_best_at_its_own_measure(batch: Batch) -> None:
    buckets = Buckets(grid(LENGTHS, BATCHES, pad_max=0.25, max_tokens=256 * 64), pad_max=0.25)
    latency, memory = (
        buckets.split(batch, s, time=lambda c, b: linear(b.padded(c)), stock=linear) for s in ("latency", "memory")
    )
    assert latency.seconds is not None
    assert memory.seconds is not None
    assert latency.seconds <= memory.seconds
    assert memory.waste <= latency.waste


def test_the_papers_example() -> None:
    buckets = Buckets([Cell(n * b, n, b) for n in (16, 32, 64) for b in (1, 2, 4)], pad_max=0.5)
    batch = Batch.of([29, 47, 13, 58])
    latency = buckets.split(batch, "latency")
    assert [str(p.cell) for p in latency.parts] == ["64x4/256"]
    memory = buckets.split(batch, "memory")
    assert memory.waste < latency.waste
    assert sorted(m for p in memory.parts for m in p.members) == [0, 1, 2, 3]


def test_a_strategy_must_be_known() -> None:
    with pytest.raises(ValueError, match="latency, memory"):
        Buckets([], pad_max=0.25).split(Batch.of([1]), "fastest")


# -- rank and budget


def test_ranking_covers_most_batches_with_few_cells() -> None:
    cells = grid(LENGTHS, BATCHES, pad_max=0.25, max_tokens=2048)
    seen = [b for b in expected_batches(LENGTHS, BATCHES) if b.tokens <= 512]
    best = rank(cells, seen, pad_max=0.25, count=32)
    assert len(best) <= 32
    buckets = Buckets(best, pad_max=0.25)
    served = [(b, c) for b in seen if (c := buckets.nearest(b))]
    assert len(served) > 0.9 * len(seen)
    rows = sum(c.tokens for _, c in served)
    assert sum(c.tokens - b.tokens for b, c in served) <= 0.25 * rows


@given(st.integers(0, 12))
@settings(deadline=None, max_examples=10)
def test_a_longer_ranking_begins_with_the_shorter(count: int) -> None:
    cells = grid((8, 64), (1, 8), pad_max=0.25, max_tokens=512)
    seen = expected_batches((8, 64), (1, 8), count=64)
    assert rank(cells, seen, pad_max=0.25, count=12)[:count] == rank(cells, seen, pad_max=0.25, count=count)


@given(st.integers(1, 9), st.floats(0.1, 50.0), st.floats(0.0, 500.0), st.floats(0.1, 5.0), st.floats(0.0, 90.0))
def test_capture_never_leaves_its_budget(
    graphs: int, seconds: float, mib: float, each_s: float, each_mib: float
) -> None:
    budget = Budget(graphs, seconds, mib)
    done = 0
    while budget.allows(done, done * each_s, done * each_mib):
        done += 1
    assert done <= graphs
    # The first is let through unmeasured; the rest must fit.
    assert done <= 1 or (done * each_s <= seconds + 1e-6 and done * each_mib <= mib + 1e-6)


# -- does a replay pay


def settle(gains: Gains, batch: Batch, stock: float) -> None:
    for _ in range(2):
        gains.saw_stock(batch, stock)


@pytest.mark.parametrize("predict", [None, linear])
def test_no_replay_that_is_estimated_slower(predict: object) -> None:
    cell, batch = Cell(32, 16, 4), Batch.of([9, 9, 10])
    gains = Gains(Buckets([cell], pad_max=0.25), predict, explore_every=10)  # type: ignore[arg-type]
    assert gains.choose(batch).why == "no-estimate"
    settle(gains, batch, 0.010)
    gains.saw_cell(cell, batch, 0.012)
    assert {gains.choose(batch).why for _ in range(100)} == {"slower"}
    for _ in range(40):
        gains.saw_cell(cell, batch, 0.004)
    picked = [gains.choose(batch) for _ in range(100)]
    assert {c.why for c in picked} == {"faster", "refresh"}
    assert sum(c.why == "refresh" for c in picked) == 10
    assert gains.cell_time(cell, batch) == pytest.approx(0.004, rel=0.1)
    assert gains.stock_time(batch) == pytest.approx(0.010)


def test_a_batch_no_cell_covers_is_left_alone() -> None:
    gains = Gains(Buckets([Cell(32, 16, 4)], pad_max=0.25))
    assert gains.choose(Batch.of([17])).why == "no-cell"
    assert gains.choose(Batch.of([3])).why == "no-cell"


def test_a_cell_unknown_at_this_history_is_tried_a_bounded_number_of_times() -> None:
    cell, batch = Cell(32, 32, 4), Batch.of([30], [5000])
    gains = Gains(Buckets([cell], pad_max=0.25), explore_every=8)
    gains.saw_cell(cell, Batch.of([30]), 0.001)
    settle(gains, batch, 0.010)
    whys = [gains.choose(batch).why for _ in range(100)]
    assert whys.count("try") == Gains.TRIES
    at = [i for i, w in enumerate(whys) if w == "try"]
    assert all(b - a >= 8 for a, b in itertools.pairwise(at))


def test_the_model_carries_a_ratio_to_longer_histories() -> None:
    cell, batch = Cell(32, 32, 4), Batch.of([30], [5000])
    gains = Gains(Buckets([cell], pad_max=0.25), linear)
    gains.saw_cell(cell, Batch.of([30]), 0.5 * linear([(30, 0), (2, 0)]))
    assert gains.cell_time(cell, batch) == pytest.approx(0.5 * linear([(30, 5000), (2, 0)]))
    gains.forget(cell)
    assert gains.cell_time(cell, batch) is None


@pytest.mark.parametrize("predict", [None, linear])
def test_a_seed_counts_until_the_first_replay(predict: object) -> None:
    cell, batch = Cell(32, 16, 4), Batch.of([9, 9, 10])
    gains = Gains(Buckets([cell], pad_max=0.25), predict)  # type: ignore[arg-type]
    gains.seed(cell, Batch.of([16, 16]), 0.003)
    assert gains.cell_time(cell, batch) == pytest.approx(0.003, rel=0.1)
    settle(gains, batch, 0.010)
    assert gains.choose(batch).why == "faster"
    gains.saw_cell(cell, batch, 0.020)
    assert gains.choose(batch).why == "try"
    assert {gains.choose(batch).why for _ in range(60)} == {"slower"}


def test_one_bad_replay_does_not_condemn_a_cell_and_four_do() -> None:
    cell, batch = Cell(32, 16, 4), Batch.of([9, 9, 10])
    gains = Gains(Buckets([cell], pad_max=0.25), explore_every=8)
    gains.seed(cell, batch, 0.003)
    settle(gains, batch, 0.010)
    gains.saw_cell(cell, batch, 0.020)
    whys = []
    for _ in range(200):
        choice = gains.choose(batch)
        whys.append(choice.why)
        if choice.cell:
            gains.saw_cell(cell, batch, 0.020)
    assert whys.count("try") == Gains.TRIES - 1
    assert set(whys) == {"try", "slower"}


def test_memory_takes_the_cell_with_the_fewest_rows() -> None:
    few, fast, batch = Cell(32, 16, 4), Cell(40, 16, 4), Batch.of([16, 15])
    for strategy, expected in (("latency", fast), ("memory", few)):
        gains = Gains(Buckets([few, fast], pad_max=0.25), strategy=strategy)
        settle(gains, batch, 0.010)
        gains.saw_cell(few, batch, 0.005)
        gains.saw_cell(fast, batch, 0.004)
        assert gains.choose(batch).cell == expected


# -- replacement


@given(st.lists(batches, min_size=20, max_size=40), st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_replacement_is_bounded_and_never_takes_a_live_cell(seen: list[Batch], most: int) -> None:
    cells = grid(LENGTHS, BATCHES, pad_max=0.25, max_tokens=1024)
    buckets = Buckets(cells[::9], pad_max=0.25)
    demand = Demand(window=20)
    for batch in seen:
        demand.note(batch, buckets.nearest(batch))
    live = {c for c in buckets.cells if demand.of(c)}
    swaps = demand.swaps(buckets.cells, cells, most=most, pad_max=0.25, protect=buckets.cells[:1])
    assert len(swaps) <= most
    before = len(buckets.cells)
    for dead, wanted in swaps:
        assert dead not in live
        assert dead != min(cells[::9])
        assert wanted not in buckets.cells
        buckets.replace(dead, wanted)
    assert len(buckets.cells) == before
    assert live <= set(buckets.cells)


def test_no_replacement_before_a_whole_window_was_seen() -> None:
    cells = grid((8, 64), (1, 8), pad_max=0.25, max_tokens=512)
    demand = Demand(window=10)
    for _ in range(9):
        demand.note(Batch.of([60] * 8), None)
    assert demand.swaps(cells[:3], cells, most=4, pad_max=0.25) == []


def test_a_slightly_tighter_cell_is_not_worth_a_capture() -> None:
    dead, live, tighter = Cell(8, 8, 1), Cell(104, 64, 8), Cell(104, 64, 4)
    demand = Demand(window=10)
    for _ in range(10):
        demand.note(Batch.of([25] * 4), live)
    assert demand.swaps([dead, live], [tighter], most=1, pad_max=0.25) == []


def test_what_traffic_wants_replaces_what_it_does_not() -> None:
    dead, roof, wanted = Cell(8, 8, 1), Cell(512, 64, 8), Cell(104, 64, 8)
    buckets = Buckets([dead, roof], pad_max=0.25)
    demand = Demand(window=10)
    for _ in range(10):
        demand.note(Batch.of([20] * 5), None)
    assert demand.swaps(buckets.cells, [dead, wanted, roof], most=1, pad_max=0.25, protect=[roof]) == [(dead, wanted)]
    demand.note(Batch.of([7]), dead)
    assert demand.swaps(buckets.cells, [dead, wanted, roof], most=1, pad_max=0.25, protect=[roof]) == []
    demand.forget(dead)
    assert demand.of(dead) == 0
