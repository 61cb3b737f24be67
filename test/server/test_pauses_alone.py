"""Pauses without a server: polls of the other servers, and /pause_generation."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest


class Fake:
    """Scheduler with queues of a size, which counts the polls of the other servers."""

    _deferred_input_requests: list[Any]

    def __init__(self, waiting: int = 0) -> None:
        self.came: list[Any] = []
        self.polls = 0
        self.enable_lora = self.enable_overlap = False
        self.result_queue: deque[Any] = deque()
        self._deferred_input_requests = []
        self.waiting_queue: list[Any] = [None] * waiting
        self.disagg_prefill_inflight_queue: list[Any] = []
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[], pop_bootstrapped=list)
        self.request_receiver = SimpleNamespace(recv_requests=self.receive)
        self.device_module, self.schedule_stream = SimpleNamespace(StreamContext=nullcontext), None

    def receive(self, local_reqs: list[Any]) -> list[Any]:
        came, self.came = [*self.came, *local_reqs], []
        return came

    def process_input_requests(self, _: list[Any]) -> None:
        pass

    def process_disagg_prefill_inflight_queue(self) -> None:
        pass

    def _poll_timeout_aborts(self) -> list[Any]:
        return []

    def resolve_waiting_queue_bootstrap(self) -> None:
        self.polls += 1


def make_pauses(scheduler: Fake) -> Any:
    from sglang_laps.pauses import Pauses

    core = SimpleNamespace(paused=lambda *_: None)
    ranks = SimpleNamespace(leader=True)
    return Pauses(scheduler, core, None, ranks, None, synchronous=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("waiting", "polls"), [(100, 10), (5000, 1)])
def test_messages_cause_polls_only_if_few_requests_wait(waiting: int, polls: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 100.0)
    scheduler = Fake(waiting)
    pauses = make_pauses(scheduler)
    for _ in range(10):
        scheduler.came = [object()]
        pauses._receive_messages()
    assert scheduler.polls == polls


def test_polls_take_a_small_share_of_the_time(monkeypatch: Any) -> None:
    from sglang_laps.pauses import POLL_SHARE

    now, took = 100.0, 0.02

    class Slow(Fake):
        def resolve_waiting_queue_bootstrap(self) -> None:
            nonlocal now
            super().resolve_waiting_queue_bootstrap()
            now += took

    monkeypatch.setattr("time.perf_counter", lambda: now)
    scheduler = Slow(5000)
    pauses = make_pauses(scheduler)
    while now < 110.0:
        now += 0.004
        pauses._receive_messages()
    assert 0.02 <= scheduler.polls * took / 10.0 <= POLL_SHARE


def test_nothing_else_runs_in_pauses_after_pause_generation() -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    scheduler, flight, seen = Fake(), SimpleNamespace(reqs=[]), list[str]()
    pauses = make_pauses(scheduler)
    pauses._next = lambda _: seen.append("asked")
    assert not pauses._pause(flight, 10, 5.0)
    assert seen == ["asked"]
    scheduler.came = [PauseGenerationReqInput(mode="in_place")]
    for _ in range(3):
        assert not pauses._pause(flight, 10, 5.0)
    assert seen == ["asked"]
    assert len(scheduler._deferred_input_requests) == 1
