"""Bounds for both classes under overload: the whole pacer, on a toy device that runs slices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT, ClassName, classify
from laps_core.policy.fairness import SAVED, stretch
from laps_core.policy.pacer import Pacer
from laps_core.policy.preemption import DEPTH
from laps_core.policy.types import LOOKAHEAD, Paused, Plan, Running, Waiting
from laps_plan.profile import Profile

F, TOKEN = 5e-3, 25e-6
MODEL = Profile(name="test", source="made up", coefficients=Coefficients(0.0, TOKEN, 0.0, 0.0, F)).model()
CHUNK, LAYERS, THRESHOLD = 4096, 28, 256


@dataclass(slots=True, eq=False)
class Job:
    tokens: int
    arrival: float
    done: int = 0
    began: float = -1.0
    finished: float = -1.0
    ahead: int = 0
    """Tokens of the same class that waited when the job arrived."""
    slo_s: float | None = None

    @property
    def due(self) -> float | None:
        return None if self.slo_s is None else self.arrival + self.slo_s

    @property
    def cls(self) -> ClassName:
        return classify(self.tokens, THRESHOLD)


@dataclass(slots=True, eq=False)
class Batch:
    cls: ClassName
    parts: list[tuple[Job, int]]
    running: Running
    each_s: float
    slices: int
    within: bool
    begin: float = -1.0
    end: float = -1.0
    paused_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin - self.paused_s


Feed = Callable[["Toy"], list[Job]]
"""Function that returns the jobs that arrive now, given the toy's waiting jobs."""


@dataclass
class Toy:
    """Device with one batch at a time; long batches run in slices, and each batch takes the predicted time."""

    feed: Feed
    layers: int = LAYERS
    knobs: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    shorts: list[Job] = field(default_factory=list)
    longs: list[Job] = field(default_factory=list)
    paused: list[Batch] = field(default_factory=list)
    ran: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = LapsConfig(**{"wait_window_ms": 0.0, **self.knobs})
        self.pacer = Pacer(config, chunk_tokens=CHUNK, layers=self.layers, model=MODEL)

    def run(self, until: Callable[[Toy], bool], *, limit_s: float = math.inf) -> None:
        while not until(self):
            assert self.now < limit_s, "it takes longer than it may"
            self._come()
            self._round()

    def _come(self) -> None:
        for job in self.feed(self):
            line = self.shorts if job.cls is SHORT else self.longs
            job.ahead = sum(j.tokens - j.done for j in line)
            line.append(job)

    def _round(self) -> None:
        below = {id(j) for b in self.paused for j, _ in b.parts}
        longs = [j for j in self.longs[:LOOKAHEAD] if id(j) not in below]
        if not (self.shorts or self.longs):
            self.pacer.record_empty_queue()
            self.now += 1e-3
            return
        paused = None
        if self.paused:
            top = self.paused[-1]
            under_way = [Waiting(j.tokens, 0, j.arrival) for b in self.paused for j, _ in b.parts]
            weight = self.pacer.sizes.weight(under_way)
            paused = Paused(top.each_s * top.slices, len(self.paused), weight=weight)
        views = [Waiting(j.tokens, 0, j.arrival, j.due) for j in self.shorts[:LOOKAHEAD]]
        seen = [Waiting(j.tokens - j.done, j.done, j.arrival, j.due, j.tokens, j.done > 0) for j in longs]
        plan = self.pacer.plan(self.now, views, seen, paused=paused)
        if plan.order:
            self._launch(plan, longs)
        self._slice()

    def _launch(self, plan: Plan, longs: list[Job]) -> None:
        cls, parts = plan.order[0], []
        room = (plan.long.tokens or CHUNK) if cls is LONG else CHUNK if not self.paused else CHUNK // 2
        picked = [self.shorts[i] for i in plan.picked] if cls is SHORT or plan.mixed else []
        picked += [longs[i] for i in plan.long.picked] if cls is LONG else []
        for job in picked:
            part = min(room, job.tokens - job.done)
            assert part > 0
            assert job.cls is LONG or part == job.tokens, "a short request is never cut"
            assert not self.paused or part == job.tokens, "nothing is cut beside what is paused"
            parts.append((job, part))
            room -= part
            job.began = self.now if job.began < 0.0 else job.began
        assert sum(j.done > 0 for j, _ in parts) <= 1, "one slot"
        assert sum(part < j.tokens - j.done for j, part in parts) <= 1, "one slot"
        if not plan.mixed:
            assert {j.cls for j, _ in parts} == {cls}
        shape = [(part, job.done) for job, part in parts]
        took = MODEL.predict(shape)
        assert took is not None
        count = len(parts) - len(plan.long.picked) if plan.mixed and cls is LONG else 0
        within = bool(self.paused)
        short = range(len(parts) if cls == SHORT else count)
        running = Running(cls=cls, shape=shape, short=short, within=within, stock=False)
        self.pacer.record_launch(self.now, running, plan)
        slices = -(-self.layers // plan.long.layers) if cls is LONG and plan.long.layers else 1
        self.shorts = [j for j in self.shorts if j not in picked]
        self.paused.append(Batch(cls, parts, running, took / slices, slices, within, self.now))

    def _slice(self) -> None:
        batch = self.paused[-1]
        self.now += batch.each_s
        batch.slices -= 1
        if batch.slices:
            return
        self.paused.pop()
        batch.end = self.now
        if self.paused:
            # A batch further below is paused for both; it gets this time as part of the paused time above it.
            self.paused[-1].paused_s += batch.end - batch.begin
        batch.running.started = batch.begin
        self.pacer.record_result(batch.running, self.paused[-1].running if self.paused else None, self.now)
        for job, part in batch.parts:
            job.done += part
            if job.done == job.tokens:
                job.finished = self.now
        self.longs = [j for j in self.longs if j.done < j.tokens]
        self.ran.append(batch)


def feed_at_arrivals(jobs: list[Job]) -> Feed:
    """Return a feed of these jobs at their arrival times."""
    coming = sorted(jobs, key=lambda j: j.arrival)

    def feed(toy: Toy) -> list[Job]:
        found = []
        while coming and coming[0].arrival <= toy.now:
            found.append(coming.pop(0))
        return found

    return feed


arrivals = st.lists(
    st.tuples(st.one_of(st.integers(1, 256), st.integers(257, 12_000)), st.floats(0.0, 3.0)), min_size=1, max_size=60
)
layers = st.sampled_from([0, LAYERS])
orders = st.sampled_from(["least-work", "least-work", "fcfs", "lars"])


def make_jobs(spec: list[tuple[int, float]]) -> list[Job]:
    return [Job(tokens, at) for tokens, at in spec]


@given(arrivals, layers, orders)
@settings(deadline=None, max_examples=50)
def test_every_token_is_computed_exactly_once(spec: list[tuple[int, float]], layers: int, order: str) -> None:
    jobs = make_jobs(spec)
    toy = Toy(feed_at_arrivals(jobs), layers, {"order": order})
    toy.run(lambda toy: all(j.done == j.tokens for j in jobs), limit_s=60.0)
    computed = {id(j): 0 for j in jobs}
    for batch in toy.ran:
        for job, part in batch.parts:
            computed[id(job)] += part
    assert [computed[id(j)] for j in jobs] == [j.tokens for j in jobs]
    assert not toy.paused


@given(arrivals, layers)
@settings(deadline=None, max_examples=20)
def test_equal_inputs_give_equal_schedules(spec: list[tuple[int, float]], layers: int) -> None:
    def ends() -> list[float]:
        jobs = make_jobs(spec)
        Toy(feed_at_arrivals(jobs), layers).run(lambda _: all(j.done == j.tokens for j in jobs))
        return [j.finished for j in jobs]

    assert ends() == ends()


@given(arrivals, layers)
@settings(deadline=None, max_examples=50)
def test_device_is_never_idle_while_requests_wait(spec: list[tuple[int, float]], layers: int) -> None:
    jobs = make_jobs(spec)
    toy = Toy(feed_at_arrivals(jobs), layers)
    toy.run(lambda toy: all(j.done == j.tokens for j in jobs))
    last = max(toy.ran, key=lambda b: b.end)
    busy = sum(b.seconds for b in toy.ran)
    first = min(j.arrival for j in jobs)
    gaps, covered = 0.0, first
    for batch in sorted(toy.ran, key=lambda b: b.begin):
        if batch.begin > covered:
            assert all(j.finished <= covered + 1e-9 or j.arrival >= batch.begin - 1e-3 - 1e-9 for j in jobs)
            gaps += batch.begin - covered
        covered = max(covered, batch.end)
    assert busy == pytest.approx(last.end - first - gaps, abs=1e-6)


def feed_saturating(
    shorts: int, tokens: int, longs: list[Job], small: int, least: int, most: int, slo_s: float | None = None
) -> Feed:
    """Return a feed that keeps `shorts` short requests of `tokens` waiting, each with this deadline, and `small` long
    prompts of `least` to `most` tokens. `longs` arrive at their times."""
    rest, made = feed_at_arrivals(longs), 0

    def feed(toy: Toy) -> list[Job]:
        nonlocal made
        came = rest(toy) + [Job(tokens, toy.now, slo_s=slo_s) for _ in range(shorts - len(toy.shorts))]
        little = sum(j.tokens <= most for j in toy.longs)
        for _ in range(small - little):
            made += 1
            came.append(Job(least + (made * 7919) % (most - least + 1), toy.now))
        return came

    return feed


def longest_batch_s(toy: Toy, cls: ClassName) -> float:
    return max((b.seconds for b in toy.ran if b.cls is cls), default=0.0)


def long_ttft_bound_s(toy: Toy, job: Job, older: list[Job], share: float, gap_s: float, *, deadlines: bool) -> float:
    """Return the bound of a prompt's TTFT (seconds). Guard: (A + B) / share of long time, where A is the batches of
    this and of earlier prompts, B the longest batch. Gap: of a time T, preempted work has (T - R - P) G / (G + R). R is
    a short batch, a batch of smaller prompts (with its own gap) and a run of urgent batches, P the saved preemptions.
    B is added once more for the batch that runs at the prompt's arrival."""
    b, s = longest_batch_s(toy, LONG), longest_batch_s(toy, SHORT)
    s += max((x.seconds for x in toy.ran if x.cls is LONG and x.within), default=0.0)
    a = sum(-(-j.tokens // CHUNK) for j in [*older, job]) * b
    return ((a + 2.0 * b) / share + gap_s) * stretch(gap_s, s, deadlines=deadlines) + (SAVED - 1) * s


big = st.lists(st.tuples(st.integers(5000, 30_000), st.floats(0.0, 0.5)), min_size=1, max_size=3)


@given(
    big=big,
    shorts=st.sampled_from([0, 1, 8, 40]),
    tokens=st.sampled_from([16, 256]),
    small=st.sampled_from([1, 4, 20]),
    sizes=st.sampled_from([(257, 400), (300, 3000), (3000, 4500)]),
    share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    overhead=st.sampled_from([0.05, 0.15, 0.5, 1.0]),
    slo_s=st.sampled_from([None, 0.03, 0.08, 0.2]),
)
@example(
    big=[(5000, 0.1), (8192, 0.0), (30_000, 0.5)],
    shorts=8,
    tokens=256,
    small=4,
    sizes=(257, 400),
    share=1.0,
    overhead=1.0,
    slo_s=0.03,
).via("small prompts that overtake as often as they may")
@example(
    big=[(30_000, 0.0)], shorts=8, tokens=256, small=1, sizes=(257, 400), share=1.0, overhead=0.05, slo_s=0.08
).via("a deadline that always presses")
@settings(deadline=None, max_examples=60)
def test_ttft_of_long_prompts_stays_within_bound(
    big: list[tuple[int, float]],
    shorts: int,
    tokens: int,
    small: int,
    sizes: tuple[int, int],
    share: float,
    overhead: float,
    slo_s: float | None,
) -> None:
    """The bound holds although smaller prompts and short requests, with or without deadlines, arrive forever."""
    jobs = make_jobs(big)
    knobs: dict[str, object] = {"guard": share, "preempt_overhead": overhead}
    toy = Toy(feed_saturating(shorts, tokens, jobs, small, *sizes, slo_s), knobs=knobs)
    toy.run(lambda toy: all(j.finished >= 0.0 for j in jobs), limit_s=600.0)
    everyone = {id(j): j for b in toy.ran for j, _ in b.parts if j.cls is LONG}.values()
    for job in jobs:
        older = [j for j in everyone if j.arrival <= job.arrival and j is not job]
        promised_s = long_ttft_bound_s(toy, job, older, share, F / overhead, deadlines=slo_s is not None)
        assert job.finished - job.arrival <= promised_s


def test_paused_prompt_finishes_despite_constant_preemption() -> None:
    """Short batches are as long as the gap; between two of them comes a prompt so small that overtaking always pays."""
    job = Job(16_000, 0.0)
    toy = Toy(feed_saturating(3, 256, [job], 1, 257, 400), knobs={"preempt_overhead": 1.0})
    toy.run(lambda toy: job.finished >= 0.0, limit_s=60.0)


@given(
    shorts=st.sampled_from([1, 3, 20, 200]),
    tokens=st.sampled_from([16, 200, 256]),
    small=st.sampled_from([1, 10]),
    sizes=st.sampled_from([(257, 400), (3000, 9000), (30_000, 60_000)]),
    overhead=st.sampled_from([0.05, 0.15, 1.0]),
)
@settings(deadline=None, max_examples=40)
def test_short_requests_run_in_arrival_order_within_bound(
    shorts: int, tokens: int, small: int, sizes: tuple[int, int], overhead: float
) -> None:
    """A short batch waits for the gap, paused batches (if preempting does not pay), and the short batch before it."""
    toy = Toy(feed_saturating(shorts, tokens, [], small, *sizes), knobs={"preempt_overhead": overhead})
    toy.run(lambda toy: toy.now > 6.0)
    served = sorted((j for b in toy.ran for j, _ in b.parts if j.cls is SHORT), key=lambda j: j.began)
    assert served
    assert [j.arrival for j in served] == sorted(j.arrival for j in served), "first come, first served"
    turn_s = F / overhead + DEPTH * longest_batch_s(toy, LONG) + longest_batch_s(toy, SHORT)
    for job in served:
        batches = job.ahead // (CHUNK // 2 - THRESHOLD + 1)
        assert job.began - job.arrival <= (batches + 1) * turn_s + 1e-9


def test_short_request_preempts_long_batch_within_two_slices() -> None:
    short, prompt = Job(50, 0.05), Job(CHUNK, 0.0)
    toy = Toy(feed_at_arrivals([short, prompt]))
    toy.run(lambda toy: not toy.longs and short.finished >= 0.0 and prompt.finished >= 0.0)
    assert short.began - short.arrival <= 2 * 4e-3
    assert short.finished < prompt.finished


def test_preemption_cost_stays_within_overhead_share() -> None:
    for overhead in (0.05, 0.15, 0.3):
        toy = Toy(feed_saturating(20, 50, [], 1, 20_000, 20_000), knobs={"preempt_overhead": overhead})
        toy.run(lambda toy: toy.now > 10.0)
        preempting = sum(b.running.preempts for b in toy.ran)
        assert preempting * F <= overhead * toy.now + F
        assert preempting * F >= 0.3 * overhead * toy.now, "and it is used"
