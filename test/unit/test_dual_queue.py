"""The dual queue as a whole, on a toy device with a clock of its own: nothing lost, nothing mixed, nobody starves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_laps.policy.catchup import CatchUp
from sglang_laps.policy.fairness import Launch, LongShare
from sglang_laps.policy.length import LONG, SHORT, LengthClass, classify
from sglang_laps.policy.queues import split, turn

CHUNK = 1024
THRESHOLD = 256


@dataclass(slots=True)
class Job:
    id: int
    tokens: int
    arrival: float
    done: int = 0
    finished: float = -1.0

    @property
    def cls(self) -> LengthClass:
        return classify(self.tokens, THRESHOLD)


@dataclass(slots=True)
class Batch:
    cls: LengthClass
    jobs: list[tuple[int, int]]
    begin: float
    end: float
    contended: bool


def cost(tokens: int) -> float:
    return 0.004 + tokens * 1e-4


@dataclass
class ToyServer:
    """One chunk slot, as SGLang's prefill server has; `depth` batches in flight, 2 in its overlap loop."""

    share: float
    catches_up: bool = True
    depth: int = 1
    batches: list[Batch] = field(default_factory=list)

    def run(self, jobs: list[Job]) -> None:
        ledger, catch_up, now = LongShare(self.share), CatchUp(self.share), 0.0
        coming, waiting = sorted(jobs, key=lambda j: (j.arrival, j.id)), []
        parked: Job | None = None
        flying: list[tuple[Launch, float, float, int]] = []

        def settle() -> float:
            launch, begin, end, tokens = flying.pop(0)
            ledger.settle(launch, end - begin)
            catch_up.measured(launch.cls, tokens, end - begin)
            return end

        while coming or waiting or parked:
            while coming and coming[0].arrival <= now:
                waiting.append(coming.pop(0))
            if not waiting and parked is None:
                now = settle() if flying else coming[0].arrival
                continue
            views = split(waiting, lambda j: j.cls)
            short, long = bool(views.short), bool(views.long) or parked is not None
            if not long:
                ledger.long_done()
            spare = False
            if self.catches_up and short and long and not ledger.owed():
                first = parked or views.long[0]
                fit = sum(j.tokens for j in views.short) <= CHUNK
                spare = catch_up.due(now - first.arrival, first.tokens, shorts_fit=fit)
            cls = turn(short=short, long=long, long_owed=ledger.owed() or spare)[0]
            budget, taken = CHUNK, []
            if cls is LONG and parked is not None:
                part = min(budget, parked.tokens - parked.done)
                taken.append((parked, part))
                budget -= part
            for job in views.of(cls):
                if budget <= 0 or (cls is SHORT and job.tokens > budget):
                    break
                part = min(budget, job.tokens)
                taken.append((job, part))
                budget -= part
            launch = ledger.launch(cls, contended=short and long)
            catch_up.launched(cls)
            tokens = sum(part for _, part in taken)
            begin = max(now, flying[-1][2] if flying else 0.0)
            end = begin + cost(tokens)
            flying.append((launch, begin, end, tokens))
            self.batches.append(Batch(cls, [(j.id, p) for j, p in taken], begin, end, short and long))
            gone = {j.id for j, _ in taken}
            waiting = [j for j in waiting if j.id not in gone]
            if parked is not None and parked.id in gone:
                parked = None
            for job, part in taken:
                job.done += part
                if job.done == job.tokens:
                    job.finished = end
                else:
                    assert parked is None
                    assert cls is LONG
                    parked = job
            if len(flying) == self.depth:
                now = settle()


arrivals = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 256), st.integers(257, 6000)),
        st.floats(0.0, 3.0, allow_nan=False),
    ),
    min_size=1,
    max_size=80,
)
shares = st.sampled_from([0.05, 0.25, 0.5, 1.0])


def make(spec: list[tuple[int, float]]) -> list[Job]:
    return [Job(i, tokens, at) for i, (tokens, at) in enumerate(spec)]


@given(arrivals, shares)
def test_nothing_is_lost_and_nothing_runs_twice(spec: list[tuple[int, float]], share: float) -> None:
    jobs, server = make(spec), ToyServer(share)
    server.run(jobs)
    assert all(j.done == j.tokens for j in jobs)
    ran: dict[int, int] = {}
    for batch in server.batches:
        for id_, part in batch.jobs:
            ran[id_] = ran.get(id_, 0) + part
    assert ran == {j.id: j.tokens for j in jobs}


@given(arrivals, shares)
def test_a_batch_holds_one_class_and_a_short_request_is_never_cut(spec: list[tuple[int, float]], share: float) -> None:
    jobs, server = make(spec), ToyServer(share)
    server.run(jobs)
    for batch in server.batches:
        assert {jobs[i].cls for i, _ in batch.jobs} == {batch.cls}
        if batch.cls is SHORT:
            assert all(part == jobs[i].tokens for i, part in batch.jobs)


@given(arrivals, shares)
@settings(max_examples=200)
def test_every_request_runs_within_its_bound(spec: list[tuple[int, float]], share: float) -> None:
    jobs, server = make(spec), ToyServer(share)
    server.run(jobs)
    longest = {cls: max((b.end - b.begin for b in server.batches if b.cls is cls), default=0.0) for cls in LengthClass}
    for job in jobs:
        ahead = [b for b in server.batches if b.cls is job.cls and job.arrival < b.end and b.begin < job.finished]
        work = sum(b.end - b.begin for b in ahead)
        if job.cls is LONG:
            bound = (work + 3 * longest[LONG] + longest[SHORT]) / share
        elif share < 1.0:
            bound = (work + 3 * longest[LONG] + longest[SHORT]) / (1.0 - share)
        else:
            continue
        assert job.finished - job.arrival <= bound + 1e-9


few_short = st.tuples(st.integers(1, 16), st.floats(0.0, 3.0, allow_nan=False))
whole_chunks = st.tuples(st.integers(1, 8).map(lambda n: n * CHUNK), st.floats(0.0, 1.5, allow_nan=False))


@given(
    st.lists(few_short, min_size=1, max_size=60),
    st.lists(whole_chunks, min_size=1, max_size=8),
    st.sampled_from([0.0, 0.05, 0.25, 0.5]),
    st.sampled_from([1, 2]),
)
@settings(max_examples=500, deadline=None)
def test_a_short_request_waits_for_one_chunk_and_in_the_overlap_loop_for_two(
    shorts: list[tuple[int, float]], longs: list[tuple[int, float]], share: float, depth: int
) -> None:
    """One batch holds all short requests that wait, chunks take the same time, a short batch no more than (1 - share)
    / share of it."""
    jobs, server = make(shorts + longs), ToyServer(share, depth=depth)
    server.run(jobs)
    ran = {id_: batch.begin for batch in server.batches for id_, _ in batch.jobs}
    for job in jobs:
        if job.cls is SHORT:
            ahead = [b.cls for b in server.batches if b.end > job.arrival and b.begin < ran[job.id]]
            # In the overlap loop one batch runs and one is queued behind it before anything can be decided.
            assert ahead.count(LONG) <= depth
            assert ahead.count(SHORT) <= depth


@given(arrivals, shares)
def test_equal_inputs_give_equal_schedules(spec: list[tuple[int, float]], share: float) -> None:
    one, two = ToyServer(share), ToyServer(share)
    one.run(make(spec))
    two.run(make(spec))
    assert one.batches == two.batches


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_the_long_class_gets_its_share_of_time_while_both_wait(share: float) -> None:
    jobs = [Job(i, 200, i * 0.001) for i in range(4000)]
    jobs += [Job(10_000 + i, 5000, 0.0) for i in range(100)]
    server = ToyServer(share)
    server.run(jobs)
    contended = [b for b in server.batches if b.contended]
    total = sum(b.end - b.begin for b in contended)
    long_s = sum(b.end - b.begin for b in contended if b.cls is LONG)
    assert total > 5.0
    assert long_s / total == pytest.approx(share, abs=0.02)


def test_a_lone_long_prompt_runs_chunk_after_chunk() -> None:
    job, server = Job(0, 10 * CHUNK + 5, 0.0), ToyServer(0.25)
    server.run([job])
    assert len(server.batches) == 11
    assert all(a.end == b.begin for a, b in zip(server.batches, server.batches[1:], strict=False))


def test_a_short_burst_passes_a_long_prompt() -> None:
    jobs = [Job(0, 20 * CHUNK, 0.0), *(Job(i, 64, 0.15) for i in range(1, 9))]
    server = ToyServer(0.25)
    server.run(jobs)
    first_short = next(b for b in server.batches if b.cls is SHORT)
    assert len(first_short.jobs) == 8
    assert first_short.begin - 0.15 <= cost(CHUNK)
    assert jobs[0].finished > first_short.end


def test_a_long_class_that_is_behind_gets_the_time_that_short_batches_would_waste() -> None:
    # One by one the short requests would take all of the time, twenty in a batch 62%; the long ones need 30%.
    shorts = [(50, i / 120) for i in range(120 * 60)]
    longs = [(5000, i * 1.75) for i in range(34)]
    waits = {}
    for catches_up in (False, True):
        jobs, server = make(shorts + longs), ToyServer(0.25, catches_up)
        server.run(jobs)
        waits[catches_up] = {cls: max(j.finished - j.arrival for j in jobs if j.cls is cls) for cls in (SHORT, LONG)}
    alone = 5 * cost(CHUNK)
    assert waits[False][LONG] > 10 * alone
    assert waits[True][LONG] < 6 * alone
    # A chunk, the short batch before it and one's own.
    assert waits[True][SHORT] <= cost(CHUNK) + 2 * cost(CHUNK)
