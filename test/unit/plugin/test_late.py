"""Decisions that are delayed while a batch runs. No SGLang."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from cores import make_core, make_flight
from laps_core.policy.decode import Decode
from sglang_laps.late import Late

HOLD_S = 0.15
LONG_S = 100.0
"""A wait that no delay of a busy machine lasts as long as (seconds)."""
BATCH = SimpleNamespace(forward_iter=1)


def make_late(*, until_s: float = HOLD_S, done: bool | None = False, leader: bool = True) -> tuple[Late, Any, Any]:
    """Return a Late with a batch in flight, whose successor must be decided `until_s` after the look. `done`: True if
    the batch's result is there; None if it has no event."""
    core = make_core()
    core.record_launch(BATCH, make_flight(core))
    core.pacer.decision_time_s = lambda now, running, step=None: now + until_s  # type: ignore[method-assign]
    event = None if done is None else SimpleNamespace(query=lambda: done)
    sched: Any = SimpleNamespace(
        waiting_queue=[],
        result_queue=[(None, SimpleNamespace(copy_done=event))],
        disagg_prefill_bootstrap_queue=SimpleNamespace(pop_bootstrapped=list),
        enable_continuous_input_polling=False,
        _engine_paused=False,
    )
    ranks: Any = SimpleNamespace(leader=leader)
    return Late(sched, core, ranks), sched, core


def time_wait(late: Late, receive: Any = lambda: ["x"]) -> tuple[float, list[Any]]:
    begin = time.perf_counter()
    received = late.wait(receive)
    return time.perf_counter() - begin, received


def test_decision_waits_until_due_and_returns_received_requests() -> None:
    late, _, _ = make_late()
    took_s, received = time_wait(late)
    assert took_s >= HOLD_S
    assert received == ["x"]


@pytest.mark.parametrize("kwargs", [{"done": True}, {"done": None}, {"leader": False}, {"until_s": -1.0}])
def test_requests_are_received_without_wait_if_none_is_needed(kwargs: dict[str, Any]) -> None:
    late, _, _ = make_late(**{"until_s": LONG_S, **kwargs})
    took_s, received = time_wait(late)
    assert took_s < LONG_S
    assert received == ["x"]


def test_requests_seen_while_waiting_are_not_new_to_decision() -> None:
    late, sched, core = make_late(until_s=0.0)
    looked: list[int] = []
    core.pacer.record_arrivals = lambda now, shorts, busy: looked.append(shorts)
    core.classes.views = lambda queue: setattr(core.classes, "new_shorts", len(queue))
    sched.disagg_prefill_bootstrap_queue.pop_bootstrapped = lambda: ["a", "b"]
    late.wait(list)
    assert sched.waiting_queue == ["a", "b"]
    assert (looked, core.classes.new_shorts) == ([2], 0)


@pytest.mark.parametrize("what", ["idle", "paused", "polling", "within"])
def test_no_requests_are_received_if_decision_is_not_delayed(what: str) -> None:
    late, sched, core = make_late(until_s=LONG_S)
    if what == "idle":
        core.flight_of(BATCH)
    elif what == "within":
        core.under_way.append(make_flight(core))
    sched._engine_paused, sched.enable_continuous_input_polling = what == "paused", what == "polling"
    took_s, received = time_wait(late)
    assert took_s < LONG_S
    assert received == []


def test_wait_is_skipped_if_engine_pause_is_received() -> None:
    late, sched, _ = make_late(until_s=LONG_S)

    def receive() -> list[Any]:
        sched._engine_paused = True
        return []

    took_s, _ = time_wait(late, receive)
    assert took_s < LONG_S


def test_launch_time_counts_from_last_decision_start() -> None:
    late, _, core = make_late()
    begin = time.perf_counter()
    late.record_start()
    time.sleep(0.02)
    late.record_launch()
    assert 0.02 <= core.pacer.sizes.lead_s <= time.perf_counter() - begin


@pytest.mark.parametrize("runs", [True, False])
def test_decision_waits_for_decode_step_on_server_that_also_decodes(runs: bool) -> None:
    late, sched, core = make_late(until_s=HOLD_S if runs else LONG_S)
    del sched.disagg_prefill_bootstrap_queue
    core.flight_of(BATCH)
    core.decode = Decode(None)
    core.decode.record_launch(time.perf_counter())
    if not runs:
        core.decode.record_step(0.0, 0.01, streams=1, within=False)
    took_s, received = time_wait(late)
    assert (took_s >= HOLD_S) == runs
    assert received == (["x"] if runs else [])


def test_result_taken_by_pause_received_meanwhile_is_not_awaited() -> None:
    late, sched, core = make_late(until_s=LONG_S)

    def pause_with_retract() -> list[str]:
        sched.result_queue.clear()
        core.flight_of(BATCH)
        return ["pause", "continue"]

    took_s, received = time_wait(late, pause_with_retract)
    assert took_s < LONG_S
    assert received == ["pause", "continue"]
