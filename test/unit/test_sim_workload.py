"""Simulated loads: reproducible, and of the rate and lengths they claim."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from benchmark.rig.lengths import LMSYS, read
from benchmark.sim.workload import Open, Row, Trace, fixed, lmsys, log_uniform, mix, uniform


def test_lengths_stay_in_their_range() -> None:
    rng = random.Random(0)
    for sizes, low, high in ((uniform(3, 9), 3, 9), (log_uniform(10, 5000), 10, 5000), (lmsys(256), 1, 256)):
        seen = [sizes(rng) for _ in range(5000)]
        assert low == min(seen)
        assert 0.95 * high <= max(seen) <= high
    shares = [mix(fixed(1), fixed(2), 0.3)(rng) for _ in range(20_000)]
    assert shares.count(2) / 20_000 == pytest.approx(0.3, abs=0.015)
    trace = lmsys()
    assert statistics.median([trace(rng) for _ in range(20_000)]) == pytest.approx(
        statistics.median(read(LMSYS)), rel=0.1
    )


@pytest.mark.parametrize("burst", [1.0, 8.0])
def test_open_loads_have_their_rate_and_bursts_their_clumps(burst: float) -> None:
    load = Open(fixed(1), 50.0, 40_000, seed=1, burst=burst)
    times = [r.at for r in load.arrivals()]
    assert times == sorted(times)
    assert times == [r.at for r in load.arrivals()]
    assert times != [r.at for r in Open(fixed(1), 50.0, 40_000, seed=2, burst=burst).arrivals()]
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    spread = statistics.stdev(gaps) / statistics.mean(gaps)
    assert spread == pytest.approx(1.0, abs=0.05) if burst == 1.0 else spread > 2.0


def test_a_trace_is_stretched_and_repeated() -> None:
    rows = [Row(0.0, 5, 0), Row(1.0, 6, 7)]
    seen = [(r.at, r.prompt, r.cached) for r in Trace(rows, stretch=2.0, repeat=2).arrivals()]
    assert seen == [(0.0, 5, 0), (2.0, 13, 7), (3.0, 5, 0), (5.0, 13, 7)]
