"""Stock policies: contents of each batch, computed by hand."""

from __future__ import annotations

from laps_plan.sim.request import Batch, Request
from laps_plan.sim.stock import Fcfs, Hrrn, ShortestFirst, Stock

CHUNK = 100


def add_requests(scheduler: Stock, *tokens: int) -> Stock:
    for i, n in enumerate(tokens):
        scheduler.add(Request(i, 0.0, n), 0.0)
    return scheduler


def batches(scheduler: Stock) -> list[list[tuple[int, int]]]:
    """Run the scheduler until it is empty. Return (request, new tokens) of each part of each batch."""
    seen = []
    while isinstance(batch := scheduler.next(0.0), Batch):
        seen.append([(r.number, new) for r, new, _ in batch.parts])
        scheduler.finished(batch, 0.0)
    return seen


def test_fcfs_starts_with_prompt_in_progress_and_fills_budget() -> None:
    assert batches(add_requests(Fcfs(CHUNK), 30, 150, 20, 10)) == [[(0, 30), (1, 70)], [(1, 80), (2, 20)], [(3, 10)]]


def test_fcfs_long_prompt_takes_whole_batches() -> None:
    assert batches(add_requests(Fcfs(CHUNK), 250, 5)) == [[(0, 100)], [(0, 100)], [(0, 50), (1, 5)]]


def test_fcfs_without_chunk_size_keeps_prompts_whole() -> None:
    assert batches(add_requests(Fcfs(None), 250, 5)) == [[(0, 250), (1, 5)]]


def test_shortest_first_orders_by_uncached_tokens() -> None:
    scheduler = ShortestFirst(CHUNK)
    scheduler.add(Request(0, 0.0, 60), 0.0)
    scheduler.add(Request(1, 0.0, 5, cached=1000), 0.0)
    assert batches(scheduler) == [[(1, 5), (0, 60)]]


def test_shortest_first_packs_shorter_prompts_with_chunked_prompt() -> None:
    scheduler = add_requests(ShortestFirst(CHUNK), 250)
    assert isinstance(scheduler.next(0.0), Batch)
    for i, n in enumerate((30, 40, 200), 1):
        scheduler.add(Request(i, 0.0, n), 0.0)
    # 30 + 40 are shorter than the 150 left; 200 may not be cut while another prompt is cut.
    assert batches(scheduler) == [[(0, 30), (1, 30), (2, 40)], [(0, 100)], [(0, 20), (3, 80)], [(3, 100)], [(3, 20)]]


def test_hrrn_measures_waiting_in_processed_tokens() -> None:
    scheduler = add_requests(Hrrn(CHUNK), 90)
    batch = scheduler.next(0.0)
    assert isinstance(batch, Batch)
    scheduler.add(Request(1, 0.0, 80), 0.0)
    scheduler.finished(batch, 0.0)
    scheduler.add(Request(2, 0.0, 20), 0.0)
    # 90 tokens were processed while request 1 waited, none while request 2 waited.
    assert batches(scheduler)[0][0] == (1, 80)


def test_hrrn_keeps_arrival_order_in_long_queue() -> None:
    scheduler = add_requests(Hrrn(10), *([10] * 129), 1)
    first = scheduler.next(0.0)
    assert isinstance(first, Batch)
    assert first.parts[0][0].number == 0
