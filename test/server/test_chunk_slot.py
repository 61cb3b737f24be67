"""SGLang's slot for a prompt between two chunks, and parked prompts: each is sent, ended and aborted once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from .fields import Request, SchedulerFields


class Sender:
    """Sender of a transfer that no decode server has joined yet."""

    def __init__(self) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.state = KVPoll.Bootstrapping

    def poll(self) -> Any:
        return self.state


class ParkingScheduler(SchedulerFields):
    """Scheduler fields for SGLang's chunk handling, with parked optimistic prefills."""

    attn_cp_cpu_group = attn_tp_cpu_group = None

    def __init__(self, held: Any, parked: Sequence[Any]) -> None:
        super().__init__([], held, parked)
        self.sent: list[Any] = []
        self.failed: list[Any] = []

    def checkpoint_disagg_prefill(self, req: Any) -> None:
        pass

    def send_kv_chunk(self, req: Any) -> None:
        self.sent.append(req)

    def handle_bootstrap_failure(self, req: Any) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        self.failed.append(req)
        req.finished_reason = FINISH_ABORT("no decode server")


def make_optimistic_request() -> Any:
    req: Any = Request("optimistic", 900, done=300)
    req.pending_bootstrap, req.disagg_kv_sender, req.finished_reason, req.to_finish = True, Sender(), None, None
    return req


@pytest.fixture
def parks(mixin: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return parks(held, parked), which makes SGLang's own chunk handling under LAPS."""
    from sglang.srt.disaggregation import prefill

    monkeypatch.setattr(
        prefill, "poll_and_all_reduce_attn_cp_tp_group", lambda senders, *_: [s.poll() for s in senders]
    )
    return type(
        "S",
        (ParkingScheduler, mixin, prefill.SchedulerDisaggregationPrefillMixin),
        {"__init__": ParkingScheduler.__init__},
    )


@pytest.mark.parametrize("held", [True, False])
def test_optimistic_prefill_ends_once_bootstrap_fails(parks: Any, held: bool) -> None:
    """Checked for a prompt in the slot and for a parked prompt."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    one, other = make_optimistic_request(), make_optimistic_request()
    scheduler = parks(one, [other]) if held else parks(other, [one])
    batch = SimpleNamespace(batch_is_full=False)
    scheduler.process_prefill_chunk(last_batch=None, running_batch=batch)
    assert scheduler.in_progress == ([one, other] if held else [other, one])
    assert (scheduler.sent, scheduler.failed) == ([], [])
    one.disagg_kv_sender.state = KVPoll.Failed
    scheduler.process_prefill_chunk(last_batch=None, running_batch=batch)
    assert scheduler.in_progress == [other]
    assert (scheduler.sent, scheduler.failed) == ([], [one])


def test_chunk_is_sent_once(parks: Any) -> None:
    one, other = make_optimistic_request(), make_optimistic_request()
    one.pending_bootstrap = other.pending_bootstrap = False
    scheduler = parks(one, [other])
    scheduler.laps.core.chunked.unsent = True
    batch = SimpleNamespace(batch_is_full=False)
    for _ in range(3):
        scheduler.process_prefill_chunk(last_batch=None, running_batch=batch)
        assert (scheduler.sent, scheduler.chunked_req, scheduler.laps.core.chunked.parked) == ([one], one, [other])


class AbortingScheduler(SchedulerFields):
    """Simplified model of how SGLang ends an aborted prompt in its slot."""

    def __init__(self, held: Any, parked: Sequence[Any]) -> None:
        super().__init__([], held, parked)
        self.ended: list[Any] = []

    def end(self) -> None:
        req = self._pending_chunked_abort_req
        if req is not None:
            assert self.chunked_req is req, "it ends what is in the slot"
            self.ended.append(req)
            self.chunked_req = self._pending_chunked_abort_req = None

    def took(self, recv_req: Any) -> None:
        if self.chunked_req and (recv_req.abort_all or self.chunked_req.rid.startswith(recv_req.rid)):
            self._pending_chunked_abort_req = self.chunked_req


@pytest.mark.parametrize(
    ("rid", "every", "ended", "left"),
    [
        ("Q", False, ["Q"], ["P", "R", "RR"]),
        ("R", False, ["R", "RR"], ["P", "Q"]),
        ("P", False, ["P"], ["Q", "R", "RR"]),
        ("", True, ["P", "Q", "R", "RR"], []),
        ("none", False, [], ["P", "Q", "R", "RR"]),
    ],
)
def test_abort_ends_matching_prompts_at_next_safe_point(
    mixin: Any, rid: str, every: bool, ended: list[str], left: list[str]
) -> None:
    stock = type(
        "Stock", (), {"abort_request": AbortingScheduler.took, "process_pending_chunked_abort": AbortingScheduler.end}
    )
    scheduler: Any = type("S", (AbortingScheduler, mixin, stock), {"__init__": AbortingScheduler.__init__})(
        Request("P", done=9), [Request("Q", done=9), Request("R", done=9), Request("RR", done=9)]
    )
    scheduler.abort_request(SimpleNamespace(rid=rid, abort_all=every))
    assert scheduler.ended == [], "not yet: its chunk may run"
    for _ in range(2):
        scheduler.process_pending_chunked_abort()
        assert [r.rid for r in scheduler.ended] == ended
        assert [r.rid for r in scheduler.in_progress] == left
    assert (scheduler.laps.core.chunked.aborted(), scheduler._pending_chunked_abort_req) == ([], None)


def test_prompt_aborted_while_parked_ends_in_chunk_slot(mixin: Any) -> None:
    stock = type(
        "Stock", (), {"abort_request": AbortingScheduler.took, "process_pending_chunked_abort": AbortingScheduler.end}
    )
    held, parked = Request("P", done=9), Request("Q", done=9)
    scheduler: Any = type("S", (AbortingScheduler, mixin, stock), {"__init__": AbortingScheduler.__init__})(
        held, [parked]
    )
    scheduler.abort_request(SimpleNamespace(rid="Q", abort_all=False))
    scheduler.chunked_req, scheduler.laps.core.chunked.parked = parked, [held]
    scheduler.process_pending_chunked_abort()
    assert (scheduler.ended, scheduler.chunked_req, scheduler.laps.core.chunked.parked) == ([parked], None, [held])


def test_pause_with_retract_ends_aborted_prompts_first(mixin: Any) -> None:
    """A retracted prompt would be queued, and prefilled, again."""
    retracted: list[str] = []

    def retract(self: Any, _: Any) -> None:
        retracted.extend(r.rid for r in (self.chunked_req,) if r)
        self.chunked_req = None

    fields = {"abort_request": AbortingScheduler.took, "process_pending_chunked_abort": AbortingScheduler.end}
    stock = type("Stock", (), {**fields, "pause_generation": retract})
    scheduler: Any = type("S", (AbortingScheduler, mixin, stock), {"__init__": AbortingScheduler.__init__})(
        Request("P", done=9), [Request("Q", done=9), Request("R", done=9)]
    )
    chunked = scheduler.laps.core.chunked
    scheduler.laps.colocated = SimpleNamespace(retract_rest=lambda: retracted.extend(r.rid for r in chunked.parked))
    for rid in ("P", "R"):
        scheduler.abort_request(SimpleNamespace(rid=rid, abort_all=False))
    scheduler.pause_generation(SimpleNamespace(mode="retract"))
    assert ([r.rid for r in scheduler.ended], retracted) == (["P", "R"], ["Q"])


def test_slot_and_parked_prompts_time_out(mixin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own search for timed-out requests, which looks only at batches."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    def begun(rid: str, ago_s: float) -> Any:
        req: Any = Request(rid, 900, done=300)
        req.to_finish, req.finished = None, lambda: False
        req.time_stats = SimpleNamespace(forward_entry_time=time.perf_counter() - ago_s)
        return req

    names = ("_poll_timeout_aborts", "_collect_inflight_batches")
    stock = type("Stock", (), {name: getattr(scheduler.Scheduler, name) for name in names})
    monkeypatch.setattr(scheduler, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "6")
    assert envs.SGLANG_REQ_RUNNING_TIMEOUT.get() == 6
    me: Any = type("S", (SchedulerFields, mixin, stock), {"__init__": SchedulerFields.__init__})(
        [], begun("slot", 9.9), [begun("parked", 9.9), begun("young", 0.1)]
    )
    me.running_batch = me.last_batch = None
    me.enable_continuous_input_polling = False
    assert [abort.rid for abort in me._poll_timeout_aborts()] == ["slot", "parked"]
    me.laps.core.chunked.parked[0].to_finish = "an abort that waits until its chunk is done"
    assert [abort.rid for abort in me._poll_timeout_aborts()] == ["slot"]


def test_load_counts_tokens_of_parked_prompts() -> None:
    """Checked with SGLang's own counters: /v1/loads, and the log line of a batch."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

    fields: dict[str, Any] = dict.fromkeys(SchedulerLoadInquirer.__dataclass_fields__)
    fields |= {"waiting_queue_prefix_matched": lambda: False, "get_recent_cache_hit_rate": lambda: 0.0}
    stock = SchedulerLoadInquirer(**fields | {"disaggregation_mode": DisaggregationMode.PREFILL})
    scheduler = SchedulerFields(
        [Request("w", 70)], Request("P", 900, done=300), [Request("Q", 5000, done=1000)], loads=stock
    )
    assert scheduler.load_inquirer.get_num_waiting_uncached_tokens() == 70 + 600 + 4000
    assert scheduler.load_inquirer._get_num_pending_tokens(chunk_deduct=100) == 70 + 600 + 4000 - 100
    scheduler.chunked_req, scheduler.laps.core.chunked.parked = None, []
    assert scheduler.load_inquirer.get_num_waiting_uncached_tokens() == 70
