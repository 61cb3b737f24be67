"""Simulated loads: reproducible, with the claimed rates and lengths."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from laps_plan.traffic import traces
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import fixed, lmsys, log_uniform, mix, uniform
from laps_plan.traffic.streams import Open, Trace


def test_sampled_lengths_have_expected_range_and_shares() -> None:
    rng = random.Random(0)
    for sizes, low, high in ((uniform(3, 9), 3, 9), (log_uniform(10, 5000), 10, 5000), (lmsys(256), 1, 256)):
        seen = [sizes(rng) for _ in range(5000)]
        assert low == min(seen)
        assert 0.95 * high <= max(seen) <= high
    shares = [mix(fixed(1), fixed(2), 0.3)(rng) for _ in range(20_000)]
    assert shares.count(2) / 20_000 == pytest.approx(0.3, abs=0.015)
    trace = lmsys()
    assert statistics.median([trace(rng) for _ in range(20_000)]) == pytest.approx(
        statistics.median(job.new for job in traces.read("lmsys_lengths")), rel=0.1
    )


@pytest.mark.parametrize("burst", [1.0, 8.0])
def test_open_load_has_requested_rate_and_burstiness(burst: float) -> None:
    load = Open(fixed(1), 50.0, 40_000, seed=1, burst=burst)
    times = [job.at_s for job in load.arrivals()]
    assert times == sorted(times)
    assert times == [job.at_s for job in load.arrivals()]
    assert times != [job.at_s for job in Open(fixed(1), 50.0, 40_000, seed=2, burst=burst).arrivals()]
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    spread = statistics.stdev(gaps) / statistics.mean(gaps)
    assert spread == pytest.approx(1.0, abs=0.05) if burst == 1.0 else spread > 2.0


def test_follow_up_job_starts_after_answer_and_due_time() -> None:
    trace = Trace([Job(0.0, 5), Job(1.0, 6, after=0), Job(2.0, 7, after=1)])
    assert trace.follows
    (first,) = trace.arrivals()
    second = trace.answered(0.5, first)
    assert second is not None
    assert (second.at_s, second.new) == (1.0, 6)
    third = trace.answered(5.0, second)
    assert third is not None
    assert (third.at_s, third.new) == (5.0, 7)
    assert trace.answered(6.0, third) is None
