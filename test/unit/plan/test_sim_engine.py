"""Properties of the simulator that hold for any server: no lost request, no idling, exact times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_plan.profile import Profile
from laps_plan.sim.device import Device
from laps_plan.sim.engine import Events, Server, simulate
from laps_plan.sim.fleet import Single
from laps_plan.sim.laps import Laps
from laps_plan.sim.memory import Memory
from laps_plan.sim.metrics import Outcome
from laps_plan.sim.request import Batch, Request
from laps_plan.sim.stock import Fcfs, Scheduler
from laps_plan.sim.variants import run
from laps_plan.sim.variants import scheduler as scheduler_of
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import fixed, uniform
from laps_plan.traffic.streams import Closed, Open, Trace
from simulated import CHUNK, HOST_PROFILE, MIX, PROFILE, WAYS, Sessions, p90, ttft

WHOLE = {"slice_ms": 0.0, "preempt_overhead": 0.01}
"""Knobs for stock's chunks, without slices."""


class WatchedScheduler:
    """Wrapper of a scheduler; ``check`` gets the time of each decision, the decision, and the waiting tokens."""

    def __init__(self, scheduler: Scheduler, check: Callable[[float, Batch | float | None, int], None]) -> None:
        self.scheduler = scheduler
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def next(self, now: float) -> Batch | float | None:
        said = self.scheduler.next(now)
        self._check(now, said, self.scheduler.waiting_tokens)
        return said


def watch(name: str, workload: Any, check: Callable[..., None], profile: Profile = PROFILE, **knobs: Any) -> Outcome:
    events, (policy, own) = Events(), WAYS[name]
    device = Device(profile)
    scheduler: Any = WatchedScheduler(scheduler_of(policy, CHUNK, device, {**own, **knobs}), check)
    server = Server("one", scheduler, device, events)
    return simulate(workload, Single([server]), events, chunk=CHUNK)


@pytest.mark.parametrize("name", sorted(WAYS))
@pytest.mark.parametrize("profile", [PROFILE, HOST_PROFILE], ids=lambda p: p.name)
def test_every_request_is_answered_once_and_every_token_computed_once(name: str, profile: Profile) -> None:
    computed: dict[int, int] = {}

    def count(now: float, said: Any, waiting: int) -> None:
        if isinstance(said, Batch):
            for r, new, old in said.parts:
                assert new > 0
                assert old == r.cached + computed.get(r.number, 0)
                computed[r.number] = computed.get(r.number, 0) + new
            assert sum(new for _, new, _ in said.parts) <= CHUNK

    workload = Open(MIX, 30.0, 1000, seed=3)
    sizes = {job.number: job.new for job in workload.arrivals()}
    outcome = watch(name, workload, count, profile)
    assert len(outcome.record) == outcome.sent == 1000
    assert computed == sizes
    assert min(outcome.record.ttft) > 0.0
    assert min(outcome.record.wait) >= 0.0


@pytest.mark.parametrize("name", ["fcfs", "hrrn", "shortest-prefill-first", "dual"])
def test_device_never_idles_while_requests_wait(name: str) -> None:
    def check(now: float, said: Any, waiting: int) -> None:
        assert isinstance(said, Batch) or waiting == 0

    watch(name, Open(MIX, 40.0, 1500, seed=4), check)
    watch(name, Closed(MIX, 16, 1500, seed=4), check)


def test_laps_idles_only_for_bounded_window() -> None:
    held = 0

    def check(now: float, said: Any, waiting: int) -> None:
        nonlocal held
        if not isinstance(said, Batch) and waiting:
            held += 1
            assert said is not None
            assert now < said <= now + 5e-3 + 1e-9

    watch("laps", Closed(uniform(8, 100), 6, 5000, seed=5), check, wait_window_ms=5.0)
    assert held


def test_short_prompts_join_only_long_batches_and_stay_whole() -> None:
    kinds = set()

    def check(now: float, said: Any, waiting: int) -> None:
        if isinstance(said, Batch) and said.parts:
            classes = {r.class_tokens <= 256 for r, _, _ in said.parts}
            assert len(classes) == 1 or (said.running is not None and said.running.cls == LONG)
            kinds.update(classes)
            for r, new, _ in said.parts:
                assert r.class_tokens > 256 or new == r.prompt - r.cached

    workload = Open(MIX, 40.0, 1500, seed=6)
    short = sum(job.new + job.cached <= 256 for job in workload.arrivals())
    for name in ("dual", "laps"):
        outcome = watch(name, workload, check)
        assert len(ttft(outcome, short=True)) == short
        assert len(outcome.record) == 1500
    assert kinds == {True, False}


@pytest.mark.parametrize("name", ["fcfs", "laps"])
def test_same_seed_gives_same_run(name: str) -> None:
    def once(seed: int) -> tuple[Sequence[float], float]:
        outcome = run(name, Sessions(MIX, 20, 700, seed, turn=uniform(8, 200)), HOST_PROFILE, servers=3,
                      router="pools", chunk=CHUNK, seed=seed)  # fmt: skip
        return list(outcome.record.ttft), outcome.seconds

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_lone_request_takes_predicted_time() -> None:
    from laps_plan.sim.metrics import lone_s

    profile = Profile(**{**HOST_PROFILE.__dict__, "spread": ()})
    for tokens in (1, 100, CHUNK, CHUNK + 1, 5 * CHUNK):
        for name in ("fcfs", "laps"):
            outcome = run(name, Open(fixed(tokens), 1.0, 1), profile, chunk=CHUNK, knobs=WHOLE)
            assert outcome.record.ttft[0] == pytest.approx(float(lone_s(profile, tokens, 0, CHUNK)))


def test_slices_add_only_polling_time() -> None:
    from laps_plan.sim.metrics import lone_s

    profile = Profile(**{**HOST_PROFILE.__dict__, "spread": ()})
    for tokens in (100, CHUNK, 5 * CHUNK):
        took = run("laps", Open(fixed(tokens), 1.0, 1), profile, chunk=CHUNK).record.ttft[0]
        whole = float(lone_s(profile, tokens, 0, CHUNK))
        looks = (took - whole) / profile.poll_s
        assert looks == pytest.approx(round(looks), abs=1e-6)
        assert (round(looks) == 0) == (tokens == 100), "a small batch is not worth a pause"
        assert looks < 1.2 * profile.layers * -(-tokens // CHUNK)


class RecordingScheduler(Laps):
    """Scheduler that records the results of finished batches."""

    def __init__(self, **more: Any) -> None:
        device = Device(more.pop("profile", PROFILE))
        super().__init__(LapsConfig(), more.pop("chunk", CHUNK), device.profile.model(), device=device, **more)
        self.used: list[Device] = [device]
        self.told: list[Any] = []
        self.held = 0
        pacer: Any = self.pacer
        told = pacer.record_result

        def ended(batch: Any, *args: Any) -> Any:
            took_s = told(batch, *args)
            self.told.append((batch, batch.started, batch.done, took_s))
            return took_s

        pacer.record_result = ended

    def next(self, now: float) -> Batch | float | None:
        said = super().next(now)
        self.held = max(self.held, sum(r.prompt for r in self._long if r.started >= 0.0))
        return said


def serve(scheduler: RecordingScheduler, workload: Any) -> tuple[Outcome, Server]:
    events = Events()
    server = Server("one", scheduler, scheduler.used[0], events)
    return simulate(workload, Single([server]), events, chunk=CHUNK), server


@pytest.mark.parametrize("profile", [PROFILE, HOST_PROFILE], ids=lambda p: p.name)
def test_short_request_is_served_during_long_batch(profile: Profile) -> None:
    scheduler = RecordingScheduler(profile=profile)
    outcome, _ = serve(scheduler, Trace([Job(0.0, CHUNK, 0), Job(0.02, 50, 0)]))
    (long_at, long_new, long_ttft), (short_at, short_new, short_ttft) = sorted(
        zip(outcome.record.at, outcome.record.new, outcome.record.ttft, strict=True)
    )
    assert (long_new, short_new) == (CHUNK, 50)
    assert short_at + short_ttft < long_at + long_ttft
    (short, begin, end, _), (paused, before, after, took_s) = scheduler.told
    assert (short.cls, paused.cls) == (SHORT, LONG)
    assert before < begin < end < after
    assert short.within
    assert took_s == pytest.approx(after - before - (end - begin))
    assert not paused.within


@pytest.mark.parametrize("profile", [PROFILE, HOST_PROFILE], ids=lambda p: p.name)
def test_each_batch_finishes_once_and_slices_add_up(profile: Profile) -> None:
    scheduler = RecordingScheduler(profile=profile)
    outcome, server = serve(scheduler, Open(MIX, 40.0, 800, seed=8))
    assert len(outcome.record) == 800
    assert len(scheduler.told) == server.batches
    ended = [id(batch) for batch, *_ in scheduler.told]
    assert len(set(ended)) == len(ended)
    tokens = sum(new for batch, *_ in scheduler.told for new, _ in batch.shape)
    assert tokens == sum(outcome.record.new)
    if not (profile.step_host_s or profile.poll_s > 1e-6):
        busy = sum(took_s for *_, took_s in scheduler.told)
        assert busy == pytest.approx(server.busy_s, rel=1e-3)
    assert any(took_s < end - begin - 1e-6 for _, begin, end, took_s in scheduler.told)


def test_without_slices_short_requests_share_long_steps() -> None:
    shared = 0

    def check(now: float, said: Any, waiting: int) -> None:
        nonlocal shared
        assert isinstance(said, Batch) or waiting == 0
        if isinstance(said, Batch):
            assert said.parts, "every batch is whole"
            assert sum(new for _, new, _ in said.parts) <= CHUNK
            shared += len({r.class_tokens <= 256 for r, _, _ in said.parts}) == 2

    outcome = watch("dual", Open(MIX, 40.0, 1500, seed=12), check, slice_ms=0.0)
    assert len(outcome.record) == 1500
    assert shared
    stock = run("fcfs", Open(MIX, 40.0, 1500, seed=12), PROFILE, chunk=CHUNK)
    assert p90(outcome, short=True) < p90(stock, short=True)


def test_smaller_long_prompt_preempts_larger_one() -> None:
    scheduler = RecordingScheduler(chunk=8192)
    outcome, _ = serve(scheduler, Trace([Job(0.0, 8192, 0), Job(0.02, 400, 0)]))
    assert outcome.record.ttft[0] < outcome.record.ttft[1], "in the order of the answers"
    assert [(batch.cls, batch.within) for batch, *_ in scheduler.told] == [(LONG, True), (LONG, False)]


@pytest.mark.parametrize("kv_tokens", [20_000, 30_000, 100_000])
@pytest.mark.parametrize("fetch_s", [0.0, 0.3])
def test_no_request_is_lost_with_little_kv_memory(kv_tokens: int, fetch_s: float) -> None:
    memory = Memory(kv_tokens, fetch_s)
    scheduler = RecordingScheduler(memory=memory, profile=HOST_PROFILE)
    outcome, _ = serve(scheduler, Open(MIX, 60.0, 800, seed=9))
    assert len(outcome.record) == 800
    assert scheduler.held <= kv_tokens
    memory.settle(math.inf)
    assert memory.free == kv_tokens


def test_prompt_holds_kv_memory_until_fetched() -> None:
    memory = Memory(1000, fetch_s=2.0)
    first, second = (Request.of(Job(0.0, n, 100)) for n in (500, 400))
    assert memory.takes(first)
    assert not memory.takes(second), "600 tokens are held"
    memory.ended([first], 1.0)
    memory.settle(2.9)
    assert (memory.free, memory.fetched_s) == (400, 3.0)
    memory.settle(3.0)
    assert memory.takes(second)
    with pytest.raises(ValueError, match="a prompt of 1001 tokens, memory for 1000"):
        memory.takes(Request.of(Job(0.0, 1001, 0)))


def test_latency_model_excludes_pauses() -> None:
    scheduler = RecordingScheduler(learn=True)
    serve(scheduler, Open(MIX, 30.0, 1200, seed=10))
    known, learnt = PROFILE.model(), scheduler.pacer.model
    for shape in ([(100, 0)], [(CHUNK, 0)], [(CHUNK, 8192)], [(300, 0), (700, 0)]):
        assert learnt.predict(shape) == pytest.approx(known.predict(shape), rel=0.05)


def test_lost_request_raises_error() -> None:
    class Losing(Fcfs):
        def _enter(self, request: Request) -> None:
            if request.number != 3:
                super()._enter(request)

    events = Events()
    server = Server("one", Losing(None), Device(PROFILE), events)
    with pytest.raises(RuntimeError, match="1 of 5 requests were lost"):
        simulate(Open(fixed(10), 1.0, 5), Single([server]), events)


def test_run_stops_at_until_s() -> None:
    outcome = run("laps", Open(MIX, 100.0, 5000), PROFILE, chunk=CHUNK, until_s=5.0)
    assert outcome.seconds <= 5.0
    assert 0 < len(outcome.record) < outcome.sent


def test_long_class_follows_configured_order() -> None:
    def first_three(order: str) -> list[list[int]]:
        knobs = {"order": order, "ttft_slo_ms": 1.0, "length_threshold": 10}
        scheduler = scheduler_of("laps", 100, Device(PROFILE), knobs)
        for i, tokens in enumerate((150, 400, 120)):
            scheduler.add(Request(i, 0.0, tokens), 0.0)
        seen = []
        for now in (1.0, 2.0, 3.0):
            batch = scheduler.next(now)
            assert isinstance(batch, Batch)
            batch.begin, batch.end = now, now + 0.1
            scheduler.finished(batch, now + 0.1)
            seen.append([r.number for r, _, _ in batch.parts])
        return seen

    assert first_three("fcfs") == [[0], [0], [1]]
    # All are late; by slack relative to work the smallest is the latest. The guard then runs the oldest.
    assert first_three("lars") == [[2], [0], [2]]


def test_prompt_length_basis_computes_only_uncached_tokens() -> None:
    scheduler = scheduler_of("laps", CHUNK, Device(PROFILE), {"length_basis": "prompt", "slice_ms": 0.0})
    for request in (Request(0, 0.0, 2000), Request(1, 0.0, 50, cached=30_000)):
        scheduler.add(request, 0.0)
    batch = scheduler.next(1.0)
    assert isinstance(batch, Batch)
    assert next((r.number, new, old) for r, new, old in batch.parts) == (1, 50, 30_000)


def test_each_class_gets_configured_default_deadline() -> None:
    scheduler = scheduler_of("laps", CHUNK, Device(PROFILE), {"ttft_slo_ms": (1.0, 4000.0)})
    requests = [Request(0, 0.0, 50), Request(1, 0.0, 600), Request(2, 0.0, 600)]
    requests[2].slo_s = 7.0
    for request in requests:
        scheduler.add(request, 0.0)
    assert [r.slo_s for r in requests] == [0.001, 4.0, 7.0]
