"""Parts of the glue that need SGLang imported, but no server."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import LongBatch, Paused, Plan
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang_laps.classes import Classes, Tag
from sglang_laps.core import LapsCore
from sglang_laps.flights import Part
from sglang_laps.telemetry.quotes import QuotedCore

from .adders import FcfsPolicy, make_builder
from .fields import Request, SchedulerFields


def requests(*names: str) -> list[Request]:
    return [Request(name) for name in names]


def test_failed_build_restores_queue_and_chunk_slot() -> None:
    s1, long, s2, held = requests("s1", "L1", "s2", "P")

    def build(_: Any) -> None:
        assert scheduler.chunked_req is None
        assert scheduler.waiting_queue == [s1, s2]
        assert builder.adder is not None
        assert scheduler.load_inquirer.get_waiting_queue() == []
        raise ValueError("in the builder")

    scheduler = SchedulerFields([s1, long, s2], held, stock=build)
    builder, whole = scheduler.laps.builder, scheduler.waiting_queue
    with pytest.raises(ValueError, match="in the builder"):
        builder.build_part(Part(SHORT, [s1, s2]), None)
    assert (scheduler.waiting_queue, scheduler.chunked_req, scheduler.chunked_prefill_size) == (whole, held, 512)
    assert scheduler.waiting_queue is whole
    assert builder.adder is None
    assert scheduler.load_inquirer.get_waiting_queue() is whole


@pytest.mark.parametrize(("tokens", "chunk"), [(128, 128), (0, 512), (9999, 512)])
def test_long_batch_uses_own_chunk_and_returns_chunked_request(tokens: int, chunk: int) -> None:
    long, other = requests("L", "other")
    held, parked = Request("P", 900, done=100), Request("Q", 700, done=600)

    def build(_: Any) -> str:
        assert (scheduler.waiting_queue, scheduler.chunked_req, scheduler.chunked_prefill_size) == (
            [long],
            parked,
            chunk,
        )
        scheduler.waiting_queue, scheduler.chunked_req = [], long
        return "built"

    scheduler: Any = SchedulerFields([long, other], held, [parked], build)
    assert scheduler.laps.builder.build_part(Part(LONG, [long], parked, tokens, whole=False), None) == ("built", long)
    assert (scheduler.waiting_queue, scheduler.chunked_req, scheduler.chunked_prefill_size) == ([other], held, 512)


def test_short_batch_ignores_chunk_size_of_long_batch() -> None:
    seen: list[int] = []
    scheduler: Any = SchedulerFields(requests("s"), stock=lambda _: seen.append(scheduler.chunked_prefill_size))
    scheduler.laps.builder.build_part(Part(SHORT, scheduler.waiting_queue, None, 128), None)
    assert seen == [512]


@pytest.mark.parametrize(("policy", "sorts"), [(CacheAgnosticPolicy.FCFS, False), (CacheAgnosticPolicy.LOF, True)])
def test_sglang_keeps_plan_order_with_priorities(policy: CacheAgnosticPolicy, sorts: bool) -> None:
    """SGLang would sort the part by priority and arrival."""
    seen: list[bool] = []

    def stock(_: Any) -> None:
        seen.append(scheduler.policy.enable_priority_scheduling)

    scheduler: Any = SchedulerFields(requests("s"))
    scheduler.policy = FcfsPolicy(by_priority=True)
    scheduler.policy.policy = policy
    make_builder(scheduler, scheduler.laps.core, stock).build_part(Part(SHORT, scheduler.waiting_queue), None)
    assert seen == [sorts]
    assert scheduler.policy.enable_priority_scheduling


def test_request_preempted_during_build_waits_for_next_plan(mixin: Any) -> None:
    """SGLang queues the request while it builds a batch. A long request must not join a batch of short ones."""
    preempted, shown = Request("p", 3000), []

    def stock(running: Any) -> Any:
        shown.append(list(scheduler.waiting_queue))
        if len(shown) == 1:
            scheduler._add_request_to_queue(preempted)
        return SimpleNamespace(running_batch=running, batch_to_run=None)

    queue = {"_add_request_to_queue": lambda self, req, is_retracted: self.waiting_queue.append(req)}
    waiting: list[Request] = []
    scheduler: Any = type("Me", (SchedulerFields, mixin, type("Stock", (), queue)), {})(waiting, stock=stock)
    scheduler.laps.colocated, scheduler.disagg_prefill_inflight_queue = None, []
    for _ in range(2):
        scheduler.laps.builder.build(None)
        assert scheduler.waiting_queue == [preempted]
    assert shown == [[], [preempted]]
    assert scheduler.laps.core.classes.class_of(preempted) == LONG


@pytest.mark.parametrize("beside", [False, True])
def test_ready_grammars_join_whole_queue_before_plan(beside: bool) -> None:
    """SGLang compares the queue with --max-queued-requests then. It waits for grammars, except in a pause."""
    one, ready, waits = Request("s", 30), Request("g", 30), SimpleNamespace(grammar_wait_ct=3)
    shown: list[Any] = []

    def stock(running: Any) -> Any:
        shown.append((list(scheduler.waiting_queue), scheduler.grammar_manager.grammar_queue))
        return SimpleNamespace(running_batch=running, batch_to_run=None)

    def add(req: Any) -> None:
        assert scheduler.waiting_queue == [one]
        scheduler.waiting_queue.append(req)

    scheduler: Any = SchedulerFields([one], stock=stock)
    scheduler._add_request_to_queue, scheduler.disagg_prefill_inflight_queue = add, []
    scheduler.laps.core.decide = lambda *_, **__: Plan((SHORT, LONG), picked=(0, 1), long=LongBatch(()))
    grammars = scheduler.grammar_manager
    grammars.grammar_queue, grammars.ready = [waits], [ready]
    scheduler.laps.builder.build(None, beside=beside)
    assert shown == [([one, ready], []), ([], [])]
    assert grammars.grammar_queue == [waits]
    assert (grammars.looked_s, waits.grammar_wait_ct) == (([1e-4], 3) if beside else ([0.005], 4))
    assert grammars.SGLANG_GRAMMAR_POLL_INTERVAL == 0.005


@pytest.mark.parametrize("cls", [SHORT, LONG])
def test_long_prompt_is_waited_for_that_lacks_rows_for_its_beams(cls: Any) -> None:
    """SGLang's builder ends at such a prompt, without a word. A short one waits as in stock SGLang."""
    from sglang_laps.colocated import count_rows

    def build(_: Any) -> None:
        assert scheduler.get_num_allocatable_reqs(2, running_batch=running) == 3, "rows without beams"
        assert not core.lacking
        assert scheduler.get_num_allocatable_reqs(2, 4, running_batch=running) == 0

    running, wide = SimpleNamespace(reqs=[], batch_is_full=False), Request("beams")
    scheduler: Any = SchedulerFields([wide], stock=build)
    core, scheduler.running_batch = scheduler.laps.core, running
    scheduler.get_num_allocatable_reqs = lambda running_bs, width, batch: (
        5 - running_bs if width is None else 3 // width
    )
    count_rows(scheduler, core, scheduler.laps.builder)
    scheduler.laps.builder.build_part(Part(cls, [wide], whole=False), None)
    assert core.lacking == (cls == LONG)


@pytest.mark.parametrize("cls", [SHORT, LONG])
def test_chunked_request_in_whole_batch_raises_and_restores_queue(cls: Any) -> None:
    one, held = Request("s"), Request("P", 900, done=100)
    whole = [one]
    scheduler: Any = SchedulerFields(whole, held)

    def stock(_: Any) -> Any:
        scheduler.chunked_req = one

    plan = Plan((cls,), picked=(0,), long=LongBatch((0,)))
    scheduler.laps.core.decide = lambda *_, **__: plan
    scheduler.disagg_prefill_inflight_queue = []
    one.laps_tag.new_tokens = 300 if cls is LONG else 30
    with pytest.raises(RuntimeError, match="s was cut in a batch of whole requests"):
        make_builder(scheduler, scheduler.laps.core, stock).build(None, Paused(1.0, 1, 1))
    assert (scheduler.waiting_queue, scheduler.chunked_req) == (whole, held)


def overridden(mixin: Any) -> list[str]:
    """Return the names of the methods that the mixin overrides."""
    from sglang.srt.managers.scheduler import Scheduler

    found = [name for name, own in vars(mixin).items() if callable(own) and hasattr(Scheduler, name)]
    return [name for name in found if not name.startswith("__")]


def test_disabled_scheduler_forwards_every_method_to_sglang(mixin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_laps.scheduler import scheduler_class

    called: list[tuple[str, Any]] = []
    answer = SimpleNamespace(internal_state={})

    def method(name: str, says: Any) -> Any:
        def stock_method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append((name, (args, kwargs)))
            return says

        return stock_method

    def init(self: Any) -> None:
        self.server_args = SimpleNamespace(disaggregation_mode="decode", pp_size=1)

    names = overridden(mixin)
    assert {"ingest_requests", "process_prefill_chunk", "run_batch", "on_idle"} <= set(names)
    stock = type("Stock", (), {"__init__": init, **{name: method(name, answer) for name in names}})
    said: Any
    for said in (answer, [], None):
        monkeypatch.setattr(stock, "ingest_requests", method("ingest_requests", said))
        scheduler = scheduler_class(stock, LapsConfig(graphs=True))()
        before = dict(vars(scheduler))
        for name in names:
            called.clear()
            signature = inspect.signature(getattr(scheduler, name))
            kwargs = {p.name: object() for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
            got = getattr(scheduler, name)(**kwargs)
            assert [n for n, _ in called] == [name]
            if signature.return_annotation != "None":
                assert got is (said if name == "ingest_requests" else answer)
        assert vars(scheduler) == before
    assert answer.internal_state["laps"]["enabled"] is False
    assert "--disaggregation-mode is decode" in answer.internal_state["laps"]["reason"]


def test_unknown_batch_builder_disables_laps_at_start(mixin: Any) -> None:
    from sglang_laps.scheduler import scheduler_class

    def init(self: Any) -> None:
        self.server_args = SimpleNamespace(disaggregation_mode="prefill", pp_size=1)

    stock = type("Stock", (), {"__init__": init, "get_prefill_adder_class": lambda self: dict})
    scheduler = scheduler_class(stock, LapsConfig())()
    assert scheduler.laps_status()["enabled"] is False
    assert "dict" in scheduler.laps_status()["reason"]


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        *(({}, True), ({"dp_rank": 0}, True)),
        *(({f"{kind}_rank": 1}, False) for kind in ("attn_tp", "attn_cp", "attn_dp", "dp", "pp")),
    ],
)
def test_first_of_all_requires_rank_0_in_every_group(ranks: dict[str, int], first: bool) -> None:
    from sglang_laps.ranks import first_of_all

    alone = {"attn_tp_rank": 0, "attn_cp_rank": 0, "attn_dp_rank": 0, "dp_rank": None, "pp_rank": 0}
    assert first_of_all(SimpleNamespace(**{**alone, **ranks})) is first


def untouchable(req: Any) -> int:
    """Fail: the prefix cache must not be asked."""
    raise AssertionError(f"the status asked the prefix cache for {req}")


@pytest.mark.parametrize("quotes", [False, True])
def test_status_query_changes_no_state(mixin: Any, quotes: bool) -> None:
    def req(rid: str, tokens: int, tag: Any = None) -> Any:
        more = {} if tag is None else {"laps_tag": tag}
        return SimpleNamespace(
            rid=rid,
            seqlen=tokens,
            prefix_len=0,
            sampling_params=SimpleNamespace(custom_params={"ttft_slo_ms": 9}),
            time_stats=SimpleNamespace(created_time=0.0, scheduler_recv_time=1e-9),
            **more,
        )

    config = LapsConfig(length_threshold="auto")
    pacer = Pacer(config, chunk_tokens=1024)
    classes = Classes(config, 256, untouchable, float)
    core = QuotedCore(config, pacer, classes, guaranteed=True, clock=float) if quotes else LapsCore(pacer, classes)
    core.chunked.parked = [Request("Q", 700, done=600)]
    fields: dict[str, Any] = {
        "laps_config": config,
        "tp_worker": SimpleNamespace(model_runner=SimpleNamespace()),
        "max_total_num_tokens": 4096,
        "max_req_input_len": 4090,
        "tree_cache": SimpleNamespace(disable=False),
        "waiting_queue": [
            req("cached", 9000, Tag(1e-9, 1e-9, None, new_tokens=40)),
            req("long", 900, Tag(1e-9, 1e-9, None, new_tokens=900)),
            req("new", 70),
            req("new and long", 3000),
        ],
        "chunked_req": Request("P", 5000, done=2048),
        "enable_overlap": True,
        "laps": SimpleNamespace(core=core, slices={"on": False}, dp_rank=3, group=None, together={"on": False}),
    }
    pacer.busy.add(0.0, 1e-6)
    pacer.slo.record(1e-9, "short", 2.0, 1.0)
    asked = type("Asked", (mixin,), {"__init__": lambda self: self.__dict__.update(fields)})()
    before = pickle.dumps(vars(asked))
    told = [asked.laps_status() for _ in range(3)]
    assert pickle.dumps(vars(asked)) == before
    for status in told:
        queues = status["queues"]
        assert (queues["short"]["depth"], queues["short"]["waiting_tokens"]) == (2, 40 + 70)
        assert (queues["long"]["depth"], queues["long"]["waiting_tokens"]) == (2, 900 + 3000)
        assert status["load"]["backlog_tokens"] == 40 + 70 + 900 + 3000 + 2952 + 100
        assert status["in_progress"] == 2
        assert status["dp_rank"] == 3
        assert {k: v for k, v in status["parked"].items() if k != "parked_s"} == {
            "rid": "P",
            "done_tokens": 2048,
            "total_tokens": 5000,
        }
        assert status["slices"] == {"on": False, "launch_ms": 0.0, "pause_ms": 0.0}


def test_profile_uses_resolved_chunk_size() -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.server_args import ServerArgs
    from sglang_laps import profile_warmup

    args = ServerArgs(model_path="dummy")
    declare_resolution(args, "a platform", chunked_prefill_size=2048)
    lengths: list[int] = []

    async def generate_request(request: Any, _: None) -> Any:
        lengths.append(len(request.input_ids))
        yield {}

    manager: Any = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=100, context_len=1 << 17),
        server_args=args,
        max_req_input_len=1 << 17,
        generate_request=generate_request,
    )
    asyncio.run(profile_warmup.run("prefill", manager))
    assert max(lengths) == profile_warmup.CHUNKS * 2048
    for longest in (995, 60):
        lengths.clear()
        manager.max_req_input_len = longest
        asyncio.run(profile_warmup.run("prefill", manager))
        assert max(lengths) == longest - 1, "all that SGLang accepts"
    declare_resolution(args, "a platform", chunked_prefill_size=-1)
    asyncio.run(profile_warmup.run("prefill", manager))
    assert max(lengths) == 59


def test_failed_profile_does_not_end_launch(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.server_args import ServerArgs
    from sglang_laps import profile_warmup

    async def generate_request(*_: Any) -> Any:
        raise ValueError("no room")
        yield

    manager: Any = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=100, context_len=1000),
        server_args=ServerArgs(model_path="dummy"),
        max_req_input_len=994,
        generate_request=generate_request,
    )
    asyncio.run(profile_warmup.run("prefill", manager))
    assert "LAPS: the profile ended early: no room" in caplog.text
