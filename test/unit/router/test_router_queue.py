"""Order of the router's queue, in which no request waits forever."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

pytest.importorskip("sglang_router")

from laps_core.policy.types import Waiting
from sglang_router.router_args import RouterArgs
from sglang_router_laps.queue import OLDEST_EVERY, Queue, TurnedAway


def queue(size: int = 100) -> Queue:
    made = Queue(RouterArgs(max_concurrent_requests=1, queue_size=size), lambda: True)
    assert made.enter()
    return made


async def served(made: Queue, requests: list[Waiting]) -> list[int]:
    """Serve the requests one at a time and return their order."""
    order: list[int] = []

    async def one(i: int, request: Waiting) -> None:
        await made.wait(request, math.inf)
        order.append(i)
        made.leave()

    tasks = [asyncio.create_task(one(i, r)) for i, r in enumerate(requests)]
    await asyncio.sleep(0)
    made.leave()
    await asyncio.gather(*tasks)
    assert (made.in_flight, made.waiting) == (0, 0)
    return order


def waiting(now: float, *, long: bool = False, due_in: float | None = None) -> Waiting:
    return Waiting(100, 0, now, None if due_in is None else now + due_in, priority=int(long))


def test_queue_serves_short_first_then_earliest_feasible_deadline() -> None:
    now = time.monotonic()
    requests = [
        waiting(now, long=True),
        waiting(now),
        waiting(now, due_in=-1.0),
        waiting(now, due_in=9.0),
        waiting(now, due_in=5.0),
    ]
    assert asyncio.run(served(queue(), requests)) == [4, 3, 1, 2, 0]


def test_long_request_does_not_starve() -> None:
    now = time.monotonic()
    requests = [waiting(now, long=True), *(waiting(now + i / 1e3) for i in range(3 * OLDEST_EVERY))]
    order = asyncio.run(served(queue(), requests))
    assert order.index(0) == OLDEST_EVERY - 1


def test_request_cancelled_during_admission_returns_lease() -> None:
    async def run() -> None:
        made = queue()
        task = asyncio.create_task(made.wait(waiting(time.monotonic()), math.inf))
        await asyncio.sleep(0)
        made.leave()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (made.in_flight, made.waiting) == (0, 0)

    asyncio.run(run())


def test_full_queue_returns_429() -> None:
    made = queue(size=0)
    with pytest.raises(TurnedAway) as e:
        made.check_admission()
    assert (e.value.status, e.value.after_s) == (429, 1)


def test_timer_ending_1_ms_early_counts_as_missed_deadline() -> None:
    assert queue().too_late(time.monotonic() + 0.001).status == 429
    assert queue().too_late(time.monotonic() + 9.0).status == 408
