"""Pauses and rows without a server: polls of other servers, messages that wait or do not, traces, counters,
what rows return."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laps_core.length import LONG
from laps_core.policy.types import Paused
from sglang_laps.flights import Flight


class Fake:
    """Scheduler with queues of a size, which counts the polls of the other servers."""

    _deferred_input_requests: list[Any]

    def __init__(self, waiting: int = 0) -> None:
        self.came: list[Any] = []
        self.polls, self.timeouts = 0, 0
        self.dispatched: list[Any] = []
        self.enable_lora = self.enable_overlap = self.enable_hierarchical_cache = False
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

    def process_input_requests(self, messages: list[Any]) -> None:
        self.dispatched += messages

    def process_disagg_prefill_inflight_queue(self) -> None:
        pass

    def _poll_timeout_aborts(self) -> list[Any]:
        self.timeouts += 1
        return []

    def resolve_waiting_queue_bootstrap(self) -> None:
        self.polls += 1


def make_pauses(scheduler: Fake, *adapters: str) -> Any:
    """Return the pauses of a scheduler in which a batch with requests for these LoRA adapters is paused."""
    from sglang_laps.pauses import Pauses

    reqs = [SimpleNamespace(lora_id=adapter) for adapter in adapters]
    core = SimpleNamespace(paused=lambda *_: None, under_way=[SimpleNamespace(batch=SimpleNamespace(reqs=reqs))])
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


def test_no_batch_runs_beside_row_of_ended_stream() -> None:
    """The paused pass still writes to the memory of that row, which a new request would get."""
    from sglang_laps.colocated import Colocated

    prompt, stream, built = object(), SimpleNamespace(finished=lambda: False), object()
    flight = Flight(
        cls=LONG, shape=[(400, 0), (1, 50)], batch=SimpleNamespace(reqs=[prompt, stream]), reqs=[prompt], cut=None
    )
    pauses: Any = object.__new__(Colocated)
    pauses._core = SimpleNamespace(under_way=[flight])
    pauses._scheduler = SimpleNamespace(enable_overlap=False, running_batch=None)
    pauses._builder = SimpleNamespace(build=lambda *_: SimpleNamespace(batch_to_run=built, running_batch=None))
    assert pauses._next(Paused(1.0, 1, rows=True)) is built
    stream.finished = lambda: True
    assert pauses._next(Paused(1.0, 1, rows=True)) is None


@pytest.mark.parametrize("rows", [0, 1])
def test_pass_with_rows_goes_on_if_all_its_requests_are_aborted(rows: int) -> None:
    """SGLang keeps the KV of streams, in which the layers that did not run would be missing."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang_laps.colocated import Colocated

    plain = {"session": None, "beam_group": None, "return_sampling_mask": False, "to_finish": FINISH_ABORT()}
    reqs = [SimpleNamespace(**plain) for _ in range(1 + rows)]
    batch = SimpleNamespace(reqs=reqs, return_logprob=False, return_hidden_states=False)
    shape = [(400, 0), (1, 50)][: 1 + rows]
    flight = Flight(cls=LONG, shape=shape, batch=batch, reqs=reqs[:1], cut=None)
    pauses: Any = object.__new__(Colocated)
    assert pauses._discard_if_all_aborted(flight) == (rows == 0)


def test_requests_wait_only_behind_messages_that_change_what_they_compute() -> None:
    from sglang.srt.managers import io_struct as io

    load = partial(io.LoadLoRAAdapterReqInput, lora_name="new", lora_path="new")
    unload = partial(io.UnloadLoRAAdapterReqInput, lora_name="old")
    expert_counts = io.ExpertDistributionReq(action=io.ExpertDistributionReqType.START_RECORD)
    update = io.UpdateWeightFromDiskReqInput(model_path="new")
    for message, waits, holds in (
        (io.FlushCacheReqInput(), False, False),
        (load(lora_id="new"), False, False),
        (unload(lora_id="unused"), False, False),
        (unload(lora_id="paused"), True, False),
        (expert_counts, True, False),
        (io.UpdateWeightVersionReqInput(new_version="2"), False, False),
        (io.CheckWeightsReqInput(), True, False),
        (update, True, True),
    ):
        scheduler = Fake()
        pauses = make_pauses(scheduler, "paused")
        behind = io.AbortReq(rid="x")
        scheduler.came = [message, behind]
        for _ in range(2):
            pauses._receive_messages()
        assert scheduler.dispatched == [m for m, stays in ((message, waits), (behind, holds)) if not stays], message
        assert scheduler._deferred_input_requests == [m for m in (message, behind) if m not in scheduler.dispatched]
        assert scheduler.timeouts == (1 if holds else 2), "time limits of requests are checked meanwhile"


def test_batches_in_pauses_are_traced(monkeypatch: Any) -> None:
    """Otherwise the span of a stream's decode steps would be missing (--enable-trace)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.observability import req_time_stats

    monkeypatch.setattr(req_time_stats, "get_global_tracing_enabled", lambda: True)
    scheduled: list[ForwardMode] = []
    stats = SimpleNamespace(set_last_scheduled_time=lambda mode, *_: scheduled.append(mode))
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, hicache_consumer_index=-1, reqs=[SimpleNamespace(time_stats=stats)]
    )
    pauses = make_pauses(Fake())
    pauses._launch = lambda _: None
    pauses._launch_in_pause(batch)
    assert scheduled == [ForwardMode.DECODE]


def test_copies_of_the_host_tier_are_taken_in_before_the_next_batch() -> None:
    """Until then the KV of ended requests is locked, and prompts wait for what is read from a storage."""
    from sglang_laps.pauses import COPIES_EVERY

    scheduler: Any = Fake()
    seen: list[str] = []
    scheduler.enable_hierarchical_cache = True
    scheduler.tree_cache = SimpleNamespace(check_hicache_events=lambda: seen.append("copies"))
    pauses = make_pauses(scheduler)
    pauses._next = lambda _: seen.append("batch")
    for _ in range(COPIES_EVERY):
        pauses._pause(SimpleNamespace(reqs=[]), 10, 5.0)
    assert seen == ["batch"] * (COPIES_EVERY - 1) + ["copies", "batch"]


def test_time_of_a_slice_does_not_count_as_time_of_a_step() -> None:
    """SGLang takes the time between the launches of two decode steps for that of a step, unless it was idle between."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    scheduler: Any = Fake()
    scheduler.decode_moment_totals, scheduler._prev_step = [0.0] * 6, None
    pauses, launched = make_pauses(scheduler), iter(range(4))

    def launch(batch: Any) -> None:
        batch.forward_iter = next(launched)
        batch.launch_ts, batch.after_idle_gap = 1e-2 * batch.forward_iter, scheduler._sched_idled
        scheduler._sched_idled = False
        result: Any = SimpleNamespace(get_num_generated_tokens=int)
        Scheduler._record_step_counters(scheduler, batch, result)

    pauses._launch = launch
    for run in (launch, launch, pauses._launch_in_pause, pauses._launch_in_pause):
        scheduler._sched_idled = False
        run(SimpleNamespace(forward_mode=ForwardMode.DECODE, hicache_consumer_index=0, reqs=[SimpleNamespace(rid="a")]))
    assert scheduler.decode_moment_totals[0] == 1, "the second of the steps that followed each other"


def test_prefill_time_is_without_pauses_and_tokens_of_rows_count() -> None:
    from sglang_laps.telemetry import counters

    collected: list[int] = []
    collector = SimpleNamespace(increment_realtime_tokens=lambda _, decode_tokens: collected.append(decode_tokens))
    reporter = SimpleNamespace(num_generated_tokens=7, metrics_collector=collector)
    scheduler: Any = SimpleNamespace(total_prefill_busy_us=900, metrics_reporter=reporter)
    for paused_s, rows, metrics, counted_us in ((0.0, 0, True, 900), (0.0, 2, False, 900), (1e-4, 3, True, 700)):
        reporter.current_scheduler_metrics_enabled, scheduler.total_prefill_busy_us = metrics, 900
        flight: Any = SimpleNamespace(paused_s=paused_s, rows=rows, lasted_s=2e-4)
        counters.correct(scheduler, flight, 500)
        assert scheduler.total_prefill_busy_us == counted_us
    assert (reporter.num_generated_tokens, collected) == (12, [3])


@pytest.mark.parametrize("returned", ["return_logprob", "return_hidden_states"])
def test_streams_that_return_values_of_each_token_are_not_carried(returned: str) -> None:
    """SGLang mixes rows that return hidden states, but returns these in the format of a prompt."""
    from sglang_laps import builder

    running: Any = SimpleNamespace(seq_lens_cpu=torch.tensor([5, 7]), return_logprob=False, return_hidden_states=False)
    running.reqs = [SimpleNamespace(beam_group=None)] * 2
    assert builder.context(running) == 12
    setattr(running, returned, True)
    assert builder.context(running) is None


def test_rows_are_not_carried_if_answers_must_not_depend_on_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_laps import colocated, group

    execution = SimpleNamespace(
        kernel=SimpleNamespace(dsa_prefill_backend=None),
        features=SimpleNamespace(enable_encoder_swa_bounded_replay=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    monkeypatch.setattr(colocated, "get_exec", lambda: execution)
    monkeypatch.setattr(colocated, "get_parallel", SimpleNamespace)
    monkeypatch.setattr(group, "why_not", lambda _: "one rank")
    scheduler: Any = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: True), device="cuda")
    assert colocated.mixes(scheduler)
    execution.deterministic.enable_deterministic_inference = True
    assert not colocated.mixes(scheduler)
