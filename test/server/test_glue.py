"""Parts of the glue that need SGLang imported, but no server."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_laps.pacing import Pacer
from sglang_laps.policy.busy import BusyMeter
from sglang_laps.policy.config import LapsConfig
from sglang_laps.policy.length import LONG, SHORT
from sglang_laps.policy.queues import DualQueue, Views
from sglang_laps.status import Totals

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


def test_a_short_request_that_is_cut_is_an_error_and_not_lost(mixin: Any) -> None:
    whole = [SimpleNamespace(rid="s")]
    me = Builder(whole, "P")  # type: ignore[arg-type]

    def build() -> None:
        with mixin._laps_only(me, SHORT, whole):
            me.chunked_req = whole[0]  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match="short request s was cut"):
        build()
    assert (me.waiting_queue, me.chunked_req) == (whole, "P")


def test_arrivals_are_known_on_a_machine_that_has_just_booted(mixin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 5.0)
    times = SimpleNamespace(created_time=0.0, scheduler_recv_time=4.75)
    req = SimpleNamespace(time_stats=times, sampling_params=SimpleNamespace(custom_params={"ttft_slo_ms": 60}))
    me = SimpleNamespace(
        laps_config=LapsConfig(), _laps_threshold=256, _laps_new_shorts=0, _laps_look=lambda req, tag: None
    )
    assert mixin._laps_class(me, req) is SHORT
    assert (req.laps_tag.arrival, req.laps_tag.slo_s) == (4.75, 0.06)


def overridden(mixin: Any) -> list[str]:
    """Names that the mixin puts before SGLang's."""
    from sglang.srt.managers.scheduler import Scheduler

    found = [name for name, own in vars(mixin).items() if callable(own) and hasattr(Scheduler, name)]
    return [name for name in found if not name.startswith("__")]


def test_off_inside_the_scheduler_leaves_every_method_to_sglang(mixin: Any) -> None:
    from sglang_laps.scheduler import scheduler_class

    called: list[tuple[str, Any]] = []
    answer = SimpleNamespace(internal_state={})

    def method(name: str, said: Any) -> Any:
        return lambda self, *args, **kwargs: called.append((name, (args, kwargs))) or said

    def init(self: Any) -> None:
        self.server_args = SimpleNamespace(disaggregation_mode="null", pp_size=1)

    names = overridden(mixin)
    assert {"ingest_requests", "process_prefill_chunk", "run_batch", "on_idle"} <= set(names)
    stock = type("Stock", (), {"__init__": init, **{name: method(name, answer) for name in names}})
    for said in (answer, [], None):
        stock.ingest_requests = method("ingest_requests", said)  # type: ignore[attr-defined]
        me = scheduler_class(stock, LapsConfig(graphs=True))()
        before = dict(vars(me))
        for name in names:
            called.clear()
            signature = inspect.signature(getattr(me, name))
            kwargs = {p.name: object() for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
            got = getattr(me, name)(**kwargs)
            assert [n for n, _ in called] == [name]
            if signature.return_annotation != "None":
                assert got is (said if name == "ingest_requests" else answer)
        assert vars(me) == before
    assert answer.internal_state["laps"]["enabled"] is False
    assert "--disaggregation-mode is null" in answer.internal_state["laps"]["reason"]


def test_an_unknown_batch_builder_turns_laps_off_at_start(mixin: Any) -> None:
    from sglang_laps.scheduler import scheduler_class

    def init(self: Any) -> None:
        self.server_args = SimpleNamespace(disaggregation_mode="prefill", pp_size=1)

    stock = type("Stock", (), {"__init__": init, "get_prefill_adder_class": lambda self: dict})
    me = scheduler_class(stock, LapsConfig())()
    assert me.laps_status()["enabled"] is False
    assert "dict" in me.laps_status()["reason"]


@pytest.mark.parametrize(
    ("tp", "attn_dp", "dp", "first"),
    [(0, 0, None, True), (0, 0, 0, True), (1, 0, None, False), (0, 1, None, False), (0, 0, 1, False)],
)
def test_one_rank_saves_the_latency_model(tp: int, attn_dp: int, dp: int | None, first: bool) -> None:
    from sglang_laps.scheduler import first_of_all

    assert first_of_all(SimpleNamespace(attn_tp_rank=tp, attn_dp_rank=attn_dp, dp_rank=dp)) is first


class Untouchable:
    """A prefix cache that must not be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the status asked the prefix cache for {name}")

    def __reduce__(self) -> Any:
        return (Untouchable, ())


def test_asking_for_the_status_changes_nothing(mixin: Any) -> None:
    from sglang_laps.scheduler import Tag

    def req(rid: str, tokens: int, tag: Any = None) -> Any:
        more = {} if tag is None else {"laps_tag": tag}
        return SimpleNamespace(
            rid=rid,
            seqlen=tokens,
            prefix_len=0,
            positional_embed_overrides=None,
            sampling_params=SimpleNamespace(custom_params={"ttft_slo_ms": 9}),
            time_stats=SimpleNamespace(created_time=0.0, scheduler_recv_time=1e-9),
            **more,
        )

    config = LapsConfig(length_threshold="auto")
    me = SimpleNamespace(
        laps_on=True,
        laps_config=config,
        tree_cache=Untouchable(),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace()),
        waiting_queue=[
            req("cached", 9000, Tag(1e-9, 1e-9, None, new_tokens=40)),
            req("long", 900, Tag(1e-9, 1e-9, None, new_tokens=900)),
            req("new", 70),
            req("new and long", 3000),
        ],
        chunked_req=None,
        _laps_parked_since=None,
        _laps_threshold=256,
        _laps_new_shorts=0,
        _laps_batches=3,
        _laps_dual=DualQueue(),
        _laps_pacer=Pacer(config, threshold=256, chunk_tokens=1024, page_size=1),
        _laps_busy=BusyMeter(),
        _laps_totals={SHORT: Totals(), LONG: Totals()},
        _laps_started=0.0,
    )
    me._laps_busy.add(0.0, 1e-6)
    me._laps_pacer.slo.record(1e-9, "short", 2.0, 1.0)
    asked = type("Asked", (mixin,), {})
    before = pickle.dumps(vars(me))
    told = [_status_of(asked, me) for _ in range(3)]
    assert pickle.dumps(vars(me)) == before
    for status in told:
        queues = status["queues"]
        assert (queues["short"]["depth"], queues["short"]["waiting_tokens"]) == (2, 40 + 70)
        assert (queues["long"]["depth"], queues["long"]["waiting_tokens"]) == (2, 900 + 3000)
        assert status["load"]["backlog_tokens"] == 40 + 70 + 900 + 3000


def _status_of(cls: Any, me: Any) -> Any:
    """``laps_status`` of a scheduler with these fields."""
    scheduler = cls.__new__(cls)
    vars(scheduler).update(vars(me))
    return scheduler.laps_status()


def test_the_profile_reads_the_chunk_that_sglang_chose() -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.server_args import ServerArgs
    from sglang_laps import profile

    args = ServerArgs(model_path="dummy")
    declare_resolution(args, "a platform", chunked_prefill_size=2048)
    lengths: list[int] = []

    async def generate_request(request: Any, _: None) -> Any:
        lengths.append(len(request.input_ids))
        yield {}

    manager: Any = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=100, context_len=1 << 17),
        server_args=args,
        generate_request=generate_request,
    )
    asyncio.run(profile.run("prefill", manager))
    assert max(lengths) == profile.CHUNKS * 2048
