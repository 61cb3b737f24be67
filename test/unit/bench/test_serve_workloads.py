"""Loads depend only on their seed and have the claimed properties."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from laps_plan.traffic import named, traces
from laps_plan.traffic.job import LONG, SHORT, THRESHOLD, Job
from laps_plan.traffic.named import OPEN, Offer, Replayed, Workload, make

from benchmark.load.prompts import Prompts

LONGEST = 4096
SCALE = named.Scale(LONGEST, LONGEST)


def lone_s(new: int) -> float:
    return 0.004 + new / 30000


def arrivals(workload: Workload, seed: int, span_s: float = 60.0, utilisation: float = 0.6) -> list[Job]:
    return workload.arrivals(Offer(utilisation, span_s, 40.0, lone_s), random.Random(seed))


@pytest.mark.parametrize("name", OPEN)
def test_same_seed_gives_same_jobs_and_bytes(name: str) -> None:
    first, again, other = (arrivals(make(name, SCALE), seed) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    bodies = [
        Prompts((3, 2000), 1, LONGEST, reuse=reuse, prefill_only=not reuse).bodies(first[:50], 5)
        for reuse in (False, False, True, True)
    ]
    assert bodies[0] == bodies[1]
    assert bodies[2] == bodies[3]


@pytest.mark.parametrize("name", OPEN)
def test_jobs_are_in_order_within_span_and_length(name: str) -> None:
    jobs = arrivals(make(name, SCALE), 3)
    assert jobs
    assert [j.at_s for j in jobs] == sorted(j.at_s for j in jobs)
    assert all(0.0 <= j.at_s < 60.0 and j.new >= 1 and j.new + j.cached <= LONGEST for j in jobs)


@pytest.mark.parametrize("name", ["mixed", "poisson", "bursty", "azure", "mooncake", "lmsys"])
def test_arrival_rate_matches_utilisation(name: str) -> None:
    jobs = arrivals(make(name, SCALE), 5, span_s=150.0)
    assert len(jobs) / 150.0 == pytest.approx(0.6 * 40.0, rel=0.15)


def test_bursts_are_burstier_than_poisson() -> None:
    def cv(name: str) -> float:
        times = [j.at_s for j in arrivals(make(name, SCALE), 11, span_s=300.0)]
        between = [b - a for a, b in itertools.pairwise(times)]
        return statistics.stdev(between) / statistics.fmean(between)

    assert cv("mixed") == pytest.approx(1.0, abs=0.15)
    assert cv("bursty") == pytest.approx(3.0, abs=0.6)


def test_mixed_workload_has_headline_lengths_and_shares() -> None:
    jobs = arrivals(make("mixed", named.Scale(8192, 4096)), 1, span_s=300.0)
    longs = [j for j in jobs if j.kind == LONG]
    assert {j.new for j in longs} == {4096}
    assert len(longs) / len(jobs) == pytest.approx(0.1, abs=0.02)
    assert all(16 <= j.new <= 128 for j in jobs if j.kind == SHORT)


@pytest.mark.parametrize(("name", "share"), [("whale", 0.5), ("overload", 1 / 6)])
def test_long_prompts_have_configured_share_of_work(name: str, share: float) -> None:
    jobs = arrivals(make(name, SCALE), 2, span_s=300.0, utilisation=1.2)
    long_work = sum(lone_s(j.new) for j in jobs if j.kind == LONG)
    shorts = sum(j.kind == SHORT for j in jobs)
    assert long_work / 300.0 == pytest.approx(1.2 * share, rel=0.2)
    assert shorts / 300.0 == pytest.approx(1.2 * (1 - share) * 40.0, rel=0.1)


def test_replay_keeps_order_and_lengths_of_consecutive_rows() -> None:
    workload = make("azure", SCALE)
    assert isinstance(workload, Replayed)
    lengths = [r.new for r in workload.rows]
    jobs = [j.new for j in arrivals(workload, 9, span_s=10.0)]
    assert any(lengths[i : i + len(jobs)] == jobs for i in range(len(lengths) - len(jobs)))


@pytest.mark.parametrize("name", ["azure_conv", "mooncake_synthetic", "lmsys_lengths"])
def test_lengths_shrink_by_one_factor(name: str) -> None:
    rows = traces.read(name)
    factor, scaled = traces.shrink(rows, 2048)
    whole = [r.new + r.cached for r in rows]
    assert factor == pytest.approx(min(1.0, 2048 / sorted(whole)[int(0.99 * len(whole))]), rel=0.05)
    assert max(r.new + r.cached for r in scaled) <= 2048
    cut = sum(new * factor > 2048.5 for new in whole)
    assert cut <= 0.011 * len(rows)


def test_conversation_turns_grow_and_wait_for_answers() -> None:
    jobs = arrivals(make("turns", SCALE), 4)
    last: dict[int, int] = {}
    for i, job in enumerate(jobs):
        assert job.after == last.get(job.stream)
        if job.after is None:
            assert job.cached == 0
        else:
            before = jobs[job.after]
            assert job.cached == before.cached + before.new
        last[job.stream] = i
    assert any(job.after is not None for job in jobs)


def test_turn_prompt_starts_with_previous_turn() -> None:
    prompts = Prompts((3, 2000), 1, LONGEST, reuse=True, prefill_only=False)
    first, second = Job(0.0, 20, 0, 5, continues_stream=True), Job(1.0, 30, 20, 5, continues_stream=True)
    assert prompts.ids(second, None)[:20] == prompts.ids(first, None)
    assert len(prompts.ids(second, None)) == 50


def test_without_reuse_only_new_tokens_are_sent() -> None:
    import numpy as np

    prompts = Prompts((3, 2000), 1, LONGEST, reuse=False, prefill_only=True)
    assert len(prompts.ids(Job(0.0, 30, 500, 5), np.random.default_rng(0))) == 30


def test_length_class_depends_on_new_tokens() -> None:
    assert Job(0.0, THRESHOLD, 30000).kind == SHORT
    assert Job(0.0, THRESHOLD + 1).kind == LONG


def test_code_workload_is_mostly_long_varied_and_bursty() -> None:
    jobs = arrivals(make("code", named.Scale(8192, 4096)), 3, span_s=600.0)
    new = sorted(job.new for job in jobs)
    assert sum(n <= THRESHOLD for n in new) / len(new) == pytest.approx(0.1, abs=0.02)
    assert statistics.median(n for n in new if n > THRESHOLD) == pytest.approx(1500, rel=0.1)
    assert 4 * 1500 < new[-1] <= 8192
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(jobs)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(2.0, rel=0.15)


def test_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="no workload 'nope': closed, mixed"):
        named.make("nope", SCALE)


def test_histories_hold_initially_cached_prefix_of_each_stream() -> None:
    talk = [Job(0.0, 10, 500, 1, continues_stream=True), Job(1.0, 10, 510, 1, continues_stream=True)]
    jobs = [*talk, Job(0.5, 10, 300, 2), Job(0.7, 10, 700, 2)]
    prompts = Prompts((3, 2000), 1, LONGEST, reuse=True, prefill_only=False)
    assert prompts.histories(jobs) == [prompts.whole_stream(1, 500), prompts.whole_stream(2, 700)]
    assert not Prompts((3, 2000), 1, LONGEST, reuse=False, prefill_only=True).histories(jobs)
