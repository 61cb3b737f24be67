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

from .adders import Cache, Loads, adder, builder, filled, request

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
        self.load_inquirer = Loads()

    def get_prefill_adder_class(self) -> Any:
        from sglang.srt.managers.schedule_policy import PrefillAdder

        return PrefillAdder

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        make, chunk = self.get_prefill_adder_class(), self.chunked_prefill_size
        made, self.chunked_req = filled(make, self.cache, self.waiting_queue, chunk)
        taken = made.can_run_list
        self.waiting_queue = [r for r in self.waiting_queue if r not in taken]
        return SimpleNamespace(
            running_batch=running_batch, batch_to_run=SimpleNamespace(reqs=taken, prefill_stats=None) if taken else None
        )


class Rounds:
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
        me: Any = self
        me.waiting_queue = [*me.waiting_queue, request(250), request(250)]
        if ends and me.disagg_prefill_inflight_queue:
            me.cache.free += sum(r.extend_len for r in me.disagg_prefill_inflight_queue.pop(0))
        self.batch = []
        me.get_new_batch_prefill(None)
        return [len(r.full_untruncated_fill_ids) for r in self.batch]


@pytest.fixture
def server(adder: Callable[[int, int], Any]) -> Any:
    """Return a scheduler with five short batches in flight, which hold more memory than the long request leaves."""
    from sglang_laps.scheduler import LapsPrefillMixin

    me: Any = type("Server", (Rounds, LapsPrefillMixin, Stock), {"__init__": Stock.__init__})()
    config = LapsConfig(length_basis="prompt")
    core: Any = LapsCore(Pacer(config, chunk_tokens=512), Classes(config, 256, lambda _: 0, lambda: 0.0))
    core.decide, core.record_build = me.decide, me.record_build
    stock = super(LapsPrefillMixin, me).get_new_batch_prefill
    me.laps = SimpleNamespace(core=core, builder=builder(me, core, stock))
    for _ in range(5):
        assert me.round(ends=False) == [250, 250]
    return me


SHORTS = [250, 250]


@pytest.mark.parametrize("joining", [(), (0, 1)], ids=["alone", "joined"])
def test_an_owed_long_request_starts_once_what_runs_has_ended(server: Any, joining: tuple[int, ...]) -> None:
    server.joining = joining
    server.waiting_queue.append(request(3000))
    assert [server.round() for _ in range(4)] == [SHORTS, [], [], [3000]]
    assert server.chunked_req.extend_len == 512


def test_short_requests_go_on_while_it_is_not_owed(server: Any) -> None:
    server.owed = False
    server.waiting_queue.append(request(3000))
    assert [server.round() for _ in range(6)] == [SHORTS] * 6


def test_short_requests_go_on_where_nothing_would_come_free(server: Any) -> None:
    server.waiting_queue.append(request(3000))
    server.disagg_prefill_inflight_queue.clear()  # their memory never becomes free
    assert server.round() == SHORTS
    assert server.round(ends=False) == []


@pytest.mark.parametrize("why", ["aborted", "short by now"])
def test_the_room_is_given_up_with_the_request(server: Any, why: str) -> None:
    long = request(3000)
    server.waiting_queue.append(long)
    assert [server.round(), server.round(ends=False)] == [SHORTS, []]
    if why == "aborted":
        server.waiting_queue.remove(long)
    else:
        long.laps_tag.new_tokens = 10
        long.full_untruncated_fill_ids = range(10)
        server.laps.core.classes.use_threshold(255)  # all requests are classified again
    assert server.round(ends=False)


def test_no_room_is_kept_for_what_could_never_fit(server: Any) -> None:
    server.waiting_queue.append(request(POOL - 2))  # fills the pool, with its first token and SGLang's page of margin
    assert [server.round() for _ in range(6)] == [SHORTS] * 6
