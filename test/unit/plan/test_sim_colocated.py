"""Simulated servers that decode: every token once, Little's law, and waiting times of streams."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from laps_core.policy.decode import LEAST_TARGET_S, Decode
from laps_plan.profile import Profile
from laps_plan.sim.request import Request
from laps_plan.sim.serving import LAPS, Answers, Serving, serve
from laps_plan.sim.streams import TokenLog, Tokens
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import log_uniform, mix, uniform
from laps_plan.traffic.streams import Trace, poisson

PROFILE = Profile.load("h200-qwen3-8b")
SHORTEST = "shortest-prefill-first"
SERVINGS = (
    Serving("fcfs"),
    Serving("fcfs", 512),
    Serving(SHORTEST, 512, interval=1),
    Serving(SHORTEST, 1024, mixed=True),
    Serving(LAPS),
    Serving(LAPS, knobs={"tbt_ms": 100.0}),
    Serving(LAPS, knobs={"tbt_ms": 0.0}),
)
EVERY = pytest.mark.parametrize("serving", SERVINGS, ids=lambda s: s.name)


def load(rate: float = 12.0, span_s: float = 15.0, seed: int = 0) -> Trace:
    rng = random.Random(seed)
    lengths, output = mix(uniform(16, 256), log_uniform(1024, 8192), 0.3), log_uniform(1, 200)
    return Trace([Job(at, lengths(rng), output=output(rng)) for at in poisson(rate, span_s, rng)])


def ended_requests(answers: Answers) -> list[Request]:
    return [r for log in answers.logs.logs for r in log.requests]


@EVERY
def test_each_request_ends_once_with_all_its_tokens(serving: Serving) -> None:
    trace = load()
    for servers, split in ((1, 0), (2, 0), (3, 2)):
        if split and (serving.interval or serving.mixed):
            continue
        how = Serving(serving.policy, serving.chunk, serving.interval, serving.mixed, split, serving.knobs)
        answers = serve(how, trace, PROFILE, servers)
        assert sorted(r.number for r in ended_requests(answers)) == list(range(len(trace.rows)))
        tokens = sum(row.output for row in trace.rows)
        steps = [log.streams for log in answers.logs.logs]
        assert sum(map(sum, steps)) + len(trace.rows) == tokens
        assert int(answers.logs.counts.sum()) == tokens - len(trace.rows)
        assert (answers.logs.gaps[answers.logs.counts > 0] > 0.0).all()


@EVERY
def test_littles_law_holds(serving: Serving) -> None:
    """The area under the number of requests in the system is the sum of their times in it."""
    answers = serve(serving, load(), PROFILE)
    log = answers.logs.logs[0]
    spans = [
        (r.at, r.first_s if r.first_step < 0 else log.at_s[r.first_step + r.output - 2])
        for r in ended_requests(answers)
    ]
    moves = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    there, area = 0, 0.0
    for (at, change), (after, _) in pairwise(moves):
        there += change
        area += there * (after - at)
    assert area == pytest.approx(sum(end - begin for begin, end in spans))
    assert answers.rate * np.mean([end - begin for begin, end in spans]) == pytest.approx(
        area / answers.outcome.seconds
    )


@EVERY
def test_lone_stream_gets_token_from_each_step(serving: Serving) -> None:
    answers = serve(serving, Trace([Job(0.0, 100, output=50)]), PROFILE)
    expected = [PROFILE.decode_s(1, 101 + i) for i in range(49)]
    gaps = answers.logs.gaps[answers.logs.counts > 0]
    # The first gap starts at the prefill's end; every other gap is a lone step.
    assert sorted(gaps)[:-1] == pytest.approx(expected[:48], rel=0.02)


def streams_and_long(serving: Serving) -> Answers:
    """Serve sixteen streams beside consecutive prompts of 8,192 tokens."""
    jobs = [Job(0.01 * i, 64, output=800) for i in range(16)]
    jobs += [Job(1.0 + 0.3 * i, 8192, output=4) for i in range(10)]
    return serve(serving, Trace(jobs), PROFILE)


def test_laps_meets_tbt_target_while_stock_streams_wait() -> None:
    stock, laps = streams_and_long(Serving("fcfs")), streams_and_long(Serving(LAPS))
    assert stock.logs.quantile(1.0) > 0.2
    assert laps.logs.quantile(0.99) <= 1.2 * LEAST_TARGET_S
    assert laps.logs.quantile(1.0) <= 2.0 * LEAST_TARGET_S
    even = streams_and_long(Serving(LAPS, knobs={"tbt_ms": 100.0}))
    assert 0.06 < even.logs.quantile(0.99) <= 0.12


def test_stock_flags_bound_time_between_tokens() -> None:
    small = streams_and_long(Serving("fcfs", 512, interval=1))
    mixed = streams_and_long(Serving("fcfs", 512, mixed=True))
    for answers in (small, mixed):
        assert answers.logs.quantile(1.0) < 0.05
    # A mixed chunk serves both in one step, so streams get more tokens in the same time.
    assert mixed.outcome.seconds < small.outcome.seconds


def test_short_prompt_preempts_long_prompt_and_starts_decoding() -> None:
    jobs = [Job(0.0, 64, output=400), Job(0.5, 8192, output=4), Job(0.55, 64, output=20)]
    ttft = {name: serve(Serving(name), Trace(jobs), PROFILE).ttft[2] for name in ("fcfs", LAPS)}
    assert ttft[LAPS] < 0.4 * ttft["fcfs"]
    answers = serve(Serving(LAPS), Trace(jobs), PROFILE)
    long, short = (next(r for r in ended_requests(answers) if r.number == n) for n in (1, 2))
    assert answers.logs.logs[0].at_s[short.first_step] < long.first_s


def test_prompt_that_comes_during_decode_step_runs_before_next_one() -> None:
    profile = Profile.load("h200-qwen3-30b-a3b")
    streams = [Job(0.0, 64, output=400) for _ in range(32)]
    prompts = [Job(1.0 + 0.2513 * i, 64, output=1) for i in range(20)]
    ttft = serve(Serving(LAPS), Trace(streams + prompts), profile).ttft[len(streams) :]
    alone_s = serve(Serving(LAPS), Trace([Job(0.0, 64, output=1)]), profile).ttft[0]
    step_s = profile.decode_s(32, 32 * 264)
    # A decision at the start of each step would cost one and a half steps.
    assert np.median(ttft) < alone_s + 1.25 * step_s


def test_carrying_decode_rows_lowers_ttft_in_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take less time than steps, so in overload first tokens come earlier."""
    profile, trace = Profile.load("h200-qwen3-30b-a3b"), load(60.0, 10.0)
    carried = serve(Serving(LAPS), trace, profile)
    monkeypatch.setattr(Decode, "rows_s", lambda *_: math.inf)
    apart = serve(Serving(LAPS), trace, profile)
    assert carried.ttft.mean() < 0.97 * apart.ttft.mean()
    assert carried.ttft[carried.short].mean() < 0.8 * apart.ttft[apart.short].mean()


def test_separate_decode_servers_have_short_token_gaps() -> None:
    answers = serve(Serving("fcfs", prefill=1), load(), PROFILE, 2)
    assert answers.logs.quantile(0.99) < 0.025


def test_token_gaps_and_late_counts_match_manual_count() -> None:
    log = TokenLog()
    for at, n in ((1.0, 1), (1.1, 2), (1.5, 2), (1.6, 1)):
        log.step(at, n)
    a, b = (Request(i, 0.0, 10, output=output) for i, output in enumerate((4, 4)))
    a.first_s, a.first_step, b.first_s, b.first_step = 0.7, 0, 1.0, 1
    log.requests = [a, b]
    found = Tokens.of([log])
    each = sorted(np.repeat(found.gaps, found.counts.astype(int)).tolist())
    assert each == pytest.approx([0.1, 0.1, 0.1, 0.3, 0.4, 0.4])
    assert found.late(0.2) == {0: 2, 1: 1}
    assert found.quantile(0.5) == pytest.approx(0.1)
    assert found.quantile(1.0) == pytest.approx(0.4)


def test_goodput_requires_every_token_in_time() -> None:
    answers = streams_and_long(Serving("fcfs"))
    assert answers.in_time(10.0, 10.0, 10.0).all()
    assert not answers.in_time(10.0, 10.0, 0.001).any()
    assert (answers.in_time(0.0, 10.0, 10.0) == ~answers.short).all()


def test_overlap_loop_meets_tbt_target_behind_unsliced_batches() -> None:
    """A step that is decided while an unsliced batch runs starts after that batch."""
    rng = random.Random(2)
    lengths, output = mix(uniform(16, 256), log_uniform(1024, 8192), 0.2), log_uniform(16, 400)
    trace = Trace([Job(at, lengths(rng), output=output(rng)) for at in poisson(28.0, 15.0, rng)])
    answers = serve(Serving(LAPS, knobs={"tbt_ms": 100.0}), trace, Profile.load("h200-qwen3-30b-a3b"))
    assert answers.logs.quantile(1.0) <= 0.112


def test_long_prompts_alone_start_as_soon_as_in_mixed_chunks() -> None:
    """Decode steps of their own would take a quarter of the device from the prompts of a large dense model."""
    rng, dense = random.Random(1), Profile.load("h200-qwen3-32b")
    jobs = [Job(at, rng.randint(2000, 8000), output=rng.randint(20, 200)) for at in poisson(1.3, 120.0, rng)]
    laps, mixed = (serve(s, Trace(jobs), dense) for s in (Serving(LAPS), Serving(SHORTEST, 512, mixed=True)))
    assert laps.ttft.mean() < 1.02 * mixed.ttft.mean()
    assert laps.logs.quantile(1.0) < 0.12
