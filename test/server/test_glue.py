"""Parts of the glue that need SGLang imported, but no server."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_laps.policy.length import LONG, SHORT
from sglang_laps.policy.queues import DualQueue, Views

os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")


@pytest.fixture(scope="module")
def mixin() -> Any:
    from sglang_laps.scheduler import LapsPrefillMixin

    return LapsPrefillMixin


def scheduler(parked: Any = None, low_first: bool = False, enabled: bool = True, **more: Any) -> Any:
    sign = 1 if low_first else -1
    return SimpleNamespace(
        enable_priority_scheduling=enabled, chunked_req=parked, policy=SimpleNamespace(priority_sign=sign), **more
    )


def request(priority: int | None) -> Any:
    return SimpleNamespace(priority=priority)


@pytest.mark.parametrize(
    ("short", "long", "parked", "low_first", "first"),
    [
        ([1], [5], None, False, LONG),
        ([5], [1], None, False, SHORT),
        ([5], [1], None, True, LONG),
        ([3], [3], None, False, None),
        ([3], [], 7, False, LONG),
        ([9], [2], 7, False, SHORT),
        ([None], [None], None, False, None),
    ],
)
def test_priorities_come_before_classes(
    mixin: Any, short: list[Any], long: list[Any], parked: int | None, low_first: bool, first: Any
) -> None:
    views = Views([request(p) for p in short], [request(p) for p in long])
    me = scheduler(None if parked is None else request(parked), low_first)
    assert mixin._laps_urgent(me, views) is first


def test_without_priority_scheduling_priorities_do_not_matter(mixin: Any) -> None:
    assert mixin._laps_urgent(scheduler(enabled=False), Views([request(1)], [request(9)])) is None


class Builder:
    """A stand-in for the stock scheduler's fields that the swap touches."""

    def __init__(self, queue: list[str], parked: str | None) -> None:
        self.waiting_queue, self.chunked_req, self.chunked_prefill_size = queue, parked, 512
        self.enable_staging = False
        self._laps_building = self._laps_hidden = None
        self._laps_dual: DualQueue[Any] = DualQueue()


def test_the_swap_is_undone_whatever_happens(mixin: Any) -> None:
    me = Builder(["s1", "L1", "s2"], "P")
    whole = me.waiting_queue

    def build() -> None:
        with mixin._laps_only(me, SHORT, ["s1", "s2"]):
            assert me.chunked_req is None
            raise RuntimeError

    with pytest.raises(RuntimeError):
        build()
    assert (me.waiting_queue, me.chunked_req, me.chunked_prefill_size) == (whole, "P", 512)
    assert me.waiting_queue is whole


def test_what_the_builder_took_and_added_is_kept(mixin: Any) -> None:
    s1, s2, long, new = ([n] for n in ("s1", "s2", "L", "new"))
    me = Builder([s1, long, s2], None)  # type: ignore[list-item]
    with mixin._laps_only(me, SHORT, [s1, s2]):
        me.waiting_queue = [s2, new]  # type: ignore[list-item]
    assert me.waiting_queue == [long, s2, new]


def test_a_long_pass_sees_the_parked_prefill_and_a_chunk_of_its_own(mixin: Any) -> None:
    me = Builder(["L"], "P")
    with mixin._laps_only(me, LONG, ["L"], 128):
        assert (me.chunked_req, me.chunked_prefill_size) == ("P", 128)
        me.chunked_req = None
    assert (me.chunked_req, me.chunked_prefill_size) == (None, 512)


def test_a_short_request_that_outgrew_its_class_waits_as_long(mixin: Any) -> None:
    from sglang_laps.scheduler import Tag

    tag = Tag(0.0, 0.0, None, new_tokens=40, looked=2)
    req = SimpleNamespace(laps_tag=tag)
    me = SimpleNamespace(
        laps_config=SimpleNamespace(length_basis="uncached"),
        _laps_threshold=256,
        _laps_batches=7,
        _laps_dual=DualQueue(),
    )
    me.laps_make_long = lambda r: mixin.laps_make_long(me, r)
    assert not mixin.laps_outgrown(me, req, 256)
    assert mixin.laps_outgrown(me, req, 900)
    # Long until a batch has run: looked up again at once it might come back short, and be refused for ever.
    assert (tag.new_tokens, tag.looked) == (257, 7)


class Sender:
    """The end of a transfer that no decode server has joined yet."""

    def __init__(self) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.state = KVPoll.Bootstrapping

    def poll(self) -> Any:
        return self.state


class Parks:
    """What SGLang's own chunk handling needs of a scheduler that has parked an optimistic prefill."""

    laps_on = True
    enable_overlap = False
    attn_cp_cpu_group = attn_tp_cpu_group = None
    waiting_queue: tuple[Any, ...] = ()

    def __init__(self, *_: Any) -> None:
        self._laps_chunk_unsent = False
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


def test_a_parked_prefill_learns_at_once_that_no_decode_server_takes_it(
    mixin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.disaggregation import prefill
    from sglang.srt.disaggregation.base.conn import KVPoll

    monkeypatch.setattr(
        prefill, "poll_and_all_reduce_attn_cp_tp_group", lambda senders, *_: [s.poll() for s in senders]
    )
    me = type("S", (Parks, mixin, prefill.SchedulerDisaggregationPrefillMixin), {})()
    sender = Sender()
    parked = SimpleNamespace(pending_bootstrap=True, disagg_kv_sender=sender, finished_reason=None, to_finish=None)
    me.chunked_req = parked
    batch = SimpleNamespace(batch_is_full=False)
    me.process_prefill_chunk(last_batch=None, running_batch=batch)
    assert (me.chunked_req, me.sent, me.failed) == (parked, [], [])
    sender.state = KVPoll.Failed
    me.process_prefill_chunk(last_batch=None, running_batch=batch)
    assert (me.chunked_req, me.sent, me.failed) == (None, [], [parked])
