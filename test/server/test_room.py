"""A long request that needs much memory, among short requests: batches that are built, without a server."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import LongBatch, Plan
from sglang_laps.classes import Classes
from sglang_laps.core import LapsCore

from .adders import Cache, FcfsPolicy, Grammars, LoadInquirer, adder, fill_batch, make_builder, make_request

__all__ = ["adder"]
POOL = 4096


class Stock:
    """Batch builder of a stock scheduler, over a pool of POOL tokens."""

    page_size = 1
    enable_staging = False
    chunked_prefill_size = 512
    max_total_num_tokens = POOL

    def __init__(self) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        self.disaggregation_mode = DisaggregationMode.PREFILL
        self.cache = Cache(1, POOL)
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.disagg_prefill_inflight_queue: list[Any] = []
        self.load_inquirer = LoadInquirer()
        self.grammar_manager = Grammars()
        self.policy = FcfsPolicy()

    def get_prefill_adder_class(self) -> Any:
        from sglang.srt.managers.schedule_policy import PrefillAdder

        return PrefillAdder

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        make, chunk = self.get_prefill_adder_class(), self.chunked_prefill_size
        made, self.chunked_req = fill_batch(make, self.cache, self.waiting_queue, chunk)
        taken = made.can_run_list
        self.waiting_queue = [r for r in self.waiting_queue if r not in taken]
        return SimpleNamespace(
            running_batch=running_batch, batch_to_run=SimpleNamespace(reqs=taken, prefill_stats=None) if taken else None
        )


class RoundScheduler:
    """Scheduler with predetermined decisions of LAPS, round by round."""

    batch: list[Any]
    owed = True
    joining: tuple[int, ...] = ()
    """Indices of short requests that join a long batch."""

    laps: Any
    disagg_prefill_inflight_queue: list[Any]

    def decide(self, now: float, queues: Any, *_: Any, frees_memory: bool, sent: Any) -> Plan:
        longs = queues.long
        if not longs or not self.owed:
            return Plan((SHORT, LONG) if longs else (SHORT,), long=LongBatch((0,) if longs else (), 512))
        if self.laps.core.lacking and frees_memory:
            return Plan((LONG,), long=LongBatch((0,), 512), held="memory")
        return Plan((LONG, SHORT), self.joining, long=LongBatch((0,), 512), mixed=bool(self.joining))

    def record_build(self, part: Any, batch: Any, *_: Any, **__: Any) -> None:
        self.batch = batch.reqs
        self.disagg_prefill_inflight_queue.append(batch.reqs)

    def round(self, ends: bool = True) -> list[int]:
        """Add two short requests, end the oldest running batch, build a batch; return the lengths of its requests."""
        scheduler: Any = self
        scheduler.waiting_queue = [*scheduler.waiting_queue, make_request(250), make_request(250)]
        if ends and scheduler.disagg_prefill_inflight_queue:
            scheduler.cache.free += sum(r.extend_len for r in scheduler.disagg_prefill_inflight_queue.pop(0))
        self.batch = []
        scheduler.get_new_batch_prefill(None)
        return [len(r.full_untruncated_fill_ids) for r in self.batch]


@pytest.fixture
def server(adder: Callable[[int, int], Any]) -> Any:
    """Return a scheduler with five short batches in flight, which hold more memory than the long request leaves."""
    from sglang_laps.scheduler import LapsPrefillMixin

    scheduler: Any = type("Server", (RoundScheduler, LapsPrefillMixin, Stock), {"__init__": Stock.__init__})()
    config = LapsConfig(length_basis="prompt")
    core: Any = LapsCore(Pacer(config, chunk_tokens=512), Classes(config, 256, lambda _: 0, lambda: 0.0))
    core.decide, core.record_build = scheduler.decide, scheduler.record_build
    stock = super(LapsPrefillMixin, scheduler).get_new_batch_prefill
    scheduler.laps = SimpleNamespace(core=core, builder=make_builder(scheduler, core, stock))
    for _ in range(5):
        assert scheduler.round(ends=False) == [250, 250]
    return scheduler


SHORTS = [250, 250]


@pytest.mark.parametrize("joining", [(), (0, 1)], ids=["alone", "joined"])
def test_owed_long_request_starts_after_running_batches_end(server: Any, joining: tuple[int, ...]) -> None:
    server.joining = joining
    server.waiting_queue.append(make_request(3000))
    assert [server.round() for _ in range(4)] == [SHORTS, [], [], [3000]]
    assert server.chunked_req.extend_len == 512


def test_short_requests_continue_while_long_request_is_not_owed(server: Any) -> None:
    server.owed = False
    server.waiting_queue.append(make_request(3000))
    assert [server.round() for _ in range(6)] == [SHORTS] * 6


def test_short_requests_continue_if_no_memory_would_become_free(server: Any) -> None:
    server.waiting_queue.append(make_request(3000))
    server.disagg_prefill_inflight_queue.clear()  # their memory never becomes free
    assert server.round() == SHORTS
    assert server.round(ends=False) == []


@pytest.mark.parametrize("why", ["aborted", "short by now"])
def test_reserved_memory_is_released_with_request(server: Any, why: str) -> None:
    long = make_request(3000)
    server.waiting_queue.append(long)
    assert [server.round(), server.round(ends=False)] == [SHORTS, []]
    if why == "aborted":
        server.waiting_queue.remove(long)
    else:
        long.laps_tag.new_tokens = 10
        long.full_untruncated_fill_ids = range(10)
        server.laps.core.classes.use_threshold(255)  # all requests are classified again
    assert server.round(ends=False)


def test_no_memory_is_reserved_for_request_that_cannot_fit(server: Any) -> None:
    server.waiting_queue.append(
        make_request(POOL - 2)
    )  # fills the pool, with its first token and SGLang's page of margin
    assert [server.round() for _ in range(6)] == [SHORTS] * 6


@pytest.mark.parametrize("output", [0, 100])
def test_retracted_request_that_fits_empty_pool_counts_as_lacking_memory(server: Any, output: int) -> None:
    """SGLang clips the output of a request to what the pool can hold; the tokens of a retracted one are not counted
    twice."""
    one = make_request(3000 + output)
    one.output_ids = [0] * output
    one.sampling_params.max_new_tokens = POOL - 3000 - 2
    server.waiting_queue.append(one)
    assert [server.round(), server.round(ends=False)] == [SHORTS, []]
    assert server.laps.core.lacking


def test_builder_says_if_no_request_was_considered(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.round()
    assert server.laps.core.considered
    monkeypatch.setattr(
        server.laps.builder, "_stock", lambda running: SimpleNamespace(running_batch=running, batch_to_run=None)
    )
    server.round()
    assert not server.laps.core.considered
