"""Decisions that are delayed while a batch runs. No SGLang."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from cores import core, flight
from sglang_laps.late import Late

HOLD_S = 0.15
BATCH = SimpleNamespace(forward_iter=1)


def made(*, until_s: float = HOLD_S, done: bool | None = False, leader: bool = True) -> tuple[Late, Any, Any]:
    """Return a Late with a batch in flight, whose successor must be decided `until_s` after the look. `done`: True if
    the batch's result is there; None if it has no event."""
    me = core()
    me.record_launch(BATCH, flight(me))
    me.pacer.decision_time_s = lambda now, running: now + until_s  # type: ignore[method-assign]
    event = None if done is None else SimpleNamespace(query=lambda: done)
    sched: Any = SimpleNamespace(
        waiting_queue=[],
        result_queue=[(None, SimpleNamespace(copy_done=event))],
        disagg_prefill_bootstrap_queue=SimpleNamespace(pop_bootstrapped=list),
        enable_continuous_input_polling=False,
        _engine_paused=False,
    )
    ranks: Any = SimpleNamespace(leader=leader)
    return Late(sched, me, ranks), sched, me


def waited(late: Late, receive: Any = lambda: ["x"]) -> tuple[float, list[Any]]:
    begin = time.perf_counter()
    received = late.wait(receive)
    return time.perf_counter() - begin, received


def test_it_waits_until_it_is_time_to_decide_and_returns_what_came() -> None:
    late, _, _ = made()
    took_s, received = waited(late)
    assert took_s >= HOLD_S
    assert received == ["x"]


@pytest.mark.parametrize("kwargs", [{"done": True}, {"done": None}, {"leader": False}, {"until_s": -1.0}])
def test_it_does_not_wait_where_the_result_is_there_or_another_rank_leads(kwargs: dict[str, Any]) -> None:
    late, _, _ = made(**kwargs)
    took_s, received = waited(late)
    assert took_s < HOLD_S
    assert received == ["x"]


def test_what_is_looked_at_is_no_news_to_the_decision() -> None:
    late, sched, me = made(until_s=0.0)
    looked: list[int] = []
    me.pacer.record_arrivals = lambda now, shorts, busy: looked.append(shorts)
    me.classes.views = lambda queue: setattr(me.classes, "new_shorts", len(queue))
    sched.disagg_prefill_bootstrap_queue.pop_bootstrapped = lambda: ["a", "b"]
    late.wait(list)
    assert sched.waiting_queue == ["a", "b"]
    assert (looked, me.classes.new_shorts) == ([2], 0)


@pytest.mark.parametrize("what", ["idle", "paused", "polling", "within"])
def test_nothing_is_received_twice_where_nothing_is_put_off(what: str) -> None:
    late, sched, me = made()
    if what == "idle":
        me.flight_of(BATCH)
    elif what == "within":
        me.under_way.append(flight(me))
    sched._engine_paused, sched.enable_continuous_input_polling = what == "paused", what == "polling"
    took_s, received = waited(late)
    assert took_s < HOLD_S
    assert received == []


def test_a_server_that_is_told_to_pause_does_not_wait() -> None:
    late, sched, _ = made()

    def receive() -> list[Any]:
        sched._engine_paused = True
        return []

    took_s, _ = waited(late, receive)
    assert took_s < HOLD_S


def test_a_launch_counts_from_the_last_look() -> None:
    late, _, me = made()
    late.record_start()
    time.sleep(0.02)
    late.record_launch()
    assert 0.02 <= me.pacer.sizes.lead_s < 0.02 + HOLD_S
