"""Estimate of the arriving work, its error, and detection of changes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from laps_core.pools.config import AllocConfig
from laps_core.pools.demand import FIRST, MOST_PERIODS, BusySplit, Demand
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.pressure import InstanceSignals, Work
from laps_core.protocol import ByClass

PERIOD_S = 5.0
SAMPLES = 5
"""Samples in a period."""


def feed_demand(
    work: Iterable[tuple[float, float]], demand: Demand | None = None, since: int = 0
) -> tuple[Demand, list[int]]:
    """Return a demand after these samples of (short, long) work in servers, and the samples with detected changes."""
    demand, changes = demand or Demand(AllocConfig(interval_s=PERIOD_S)), []
    for i, (short, long) in enumerate(work, since):
        demand.observe(float(i), [InstanceSignals(name="a", pool="long", busy=Work(short, long))])
        if demand.drop_before_change():
            changes.append(i)
    return demand, changes


def poisson_work(rng: random.Random, requests: float, n: int) -> list[float]:
    """Return the work in ``n`` samples with Poisson arrivals: ``requests`` on average, each a tenth of a server."""
    found = []
    for _ in range(n):
        at, came = rng.expovariate(requests), 0
        while at < 1.0:
            at, came = at + rng.expovariate(requests), came + 1
        found.append(came / 10)
    return found


def test_uncounted_requests_are_estimated_from_server_busy_time() -> None:
    demand = Demand(AllocConfig(interval_s=PERIOD_S))
    for t in range(6):
        demand.observe(t, [InstanceSignals(name="a", pool="long", busy=Work(0.2, 0.8), waiting=Work(0.0, 2.0 * t))])
    assert demand.servers() == (pytest.approx(0.2), pytest.approx(0.8))


def test_finished_long_prompts_never_make_work_negative() -> None:
    demand = Demand(AllocConfig(interval_s=PERIOD_S))
    for t in range(111):
        waits = Work(0.0, 100.0 if t < 100 else 0.0)
        busy = Work(0.0, 1.0 if t <= 100 else 0.0)
        signals = [InstanceSignals(name=f"l{i}", pool="long", busy=busy, waiting=waits) for i in range(3)]
        came = demand.observe(float(t), signals)
        assert min(came) >= 0.0
        assert max(came) <= 3.0


def make_signals(t: int, arrived: Work, busy: Work, waiting: Work = Work()) -> list[InstanceSignals]:  # noqa: B008
    return [InstanceSignals(name="a", pool="both", arrived=arrived, busy=busy, waiting=waiting)]


def test_predicted_work_is_corrected_by_measured_times() -> None:
    demand = Demand(AllocConfig(interval_s=PERIOD_S))
    for t in range(200):
        came = demand.observe(float(t), make_signals(t, Work(0.1, 0.4), Work(0.2, 0.3)))
    assert came == (pytest.approx(0.2, rel=0.1), pytest.approx(0.3, rel=0.02))
    # More arrives than the server does; the time per work is known from before.
    for t in range(200, 300):
        came = demand.observe(float(t), make_signals(t, Work(0.1, 4.0), Work(0.2, 0.8), Work(0.0, 3.0 * (t - 199))))
    assert came == (pytest.approx(0.2, rel=0.1), pytest.approx(3.0, rel=0.02))


def test_work_of_unobserved_senders_counts() -> None:
    demand = Demand(AllocConfig(interval_s=PERIOD_S))
    for t in range(100):
        came = demand.observe(float(t), make_signals(t, Work(0.0, 0.01), Work(0.5, 0.3)))
    assert came == (pytest.approx(0.5), pytest.approx(0.3, rel=0.02))


def test_one_sick_instance_does_not_inflate_demand() -> None:
    demand = Demand(AllocConfig(interval_s=PERIOD_S))
    for t in range(6):
        signals = [InstanceSignals(name=f"l{i}", pool="long", waiting=Work(0.0, 1e6 * t * (not i))) for i in range(4)]
        demand.observe(t, signals)
    assert demand.servers().long <= 1.0 + 0.2


def test_steady_work_is_averaged_over_several_periods() -> None:
    demand, changes = feed_demand([(1.0, 2.0)] * 60)
    assert demand.servers() == (pytest.approx(1.0), pytest.approx(2.0))
    assert (demand.span_s, changes) == (MOST_PERIODS * PERIOD_S, [])
    assert demand.error().long < 0.01


@pytest.mark.parametrize("requests", [0.5, 4.0, 70.0])
def test_random_arrivals_are_rarely_taken_for_change(requests: float) -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(20):
        short, long = (poisson_work(rng, r, 100) for r in (requests, requests / 3))
        found += len(feed_demand(zip(short, long, strict=True))[1])
    assert found <= 20, "of 2000 samples"


@pytest.mark.parametrize("requests", [4.0, 70.0])
def test_standard_error_matches_random_variation(requests: float) -> None:
    rng = random.Random(5)
    misses = []
    for _ in range(60):
        short = poisson_work(rng, requests, 60)
        demand, _ = feed_demand((s, 0.0) for s in short)
        misses.append(abs(demand.servers().short - requests / 10) / demand.error().short)
    assert 0.4 < sorted(misses)[30] < 1.0, "half of them within about two thirds of the error"


def test_only_samples_after_change_count() -> None:
    for before, after in (((28.8, 9.6), (1.4, 37.0)), ((1.4, 37.0), (28.8, 9.6)), ((3.0, 1.0), (3.0, 0.0))):
        demand, changes = feed_demand([before] * 40 + [after] * 3)
        assert changes
        assert demand.servers() == (pytest.approx(after[0]), pytest.approx(after[1]))
        assert demand.span_s <= 3.0


def test_frequent_changes_count_as_noise() -> None:
    swings = [(8.0, 1.0) if i // 2 % 2 else (1.0, 8.0) for i in range(200)]
    _, changes = feed_demand(swings)
    assert not [at for at in changes if at > 3 * FIRST]


def test_busy_split_uses_class_times_reported_by_server() -> None:
    spent, outlook = BusySplit(), Outlook(Learnt())
    assert spent.since(10.0, 0.9, ByClass(short=1.0, long=5.0), outlook) == (0.0, 0.0), "nobody knows since when"
    assert spent.since(12.0, 0.9, ByClass(short=1.5, long=6.5), outlook) == (0.25, 0.75)
    assert spent.since(12.0, 0.9, ByClass(short=1.5, long=6.5), outlook) == (0.25, 0.75), "the same answer again"
    assert spent.since(14.0, 0.9, ByClass(short=1.5, long=7.5), outlook) == (0.0, 0.5), "one class has nothing"
    assert spent.since(18.0, 0.9, ByClass(short=3.5, long=7.5), outlook) == (0.5, 0.0)


def test_share_after_missed_answers_covers_whole_time() -> None:
    spent, outlook = BusySplit(), Outlook(Learnt())
    spent.since(10.0, 0.9, ByClass(short=1.0, long=5.0), outlook)
    assert spent.since(16.0, 0.9, ByClass(short=1.0, long=10.4), outlook) == (0.0, pytest.approx(0.9))


def test_busy_share_is_capped_without_losing_time() -> None:
    """A step of 4 s is reported only at its end."""
    spent, outlook = BusySplit(), Outlook(Learnt())
    told = [0.0, 0.0, 0.0, 0.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    shares = [spent.since(float(t), 0.9, ByClass(short=0.0, long=x), outlook).long for t, x in enumerate(told)]
    assert max(shares) == 1.0
    assert sum(shares) == pytest.approx(4.0)
    for huge in (1e308, 1.7e308):
        share = spent.since(20.0 + huge / 1e308, 0.9, ByClass(short=huge, long=huge), outlook)
        assert 0.0 <= sum(share) <= 1.0


@pytest.mark.parametrize(("short", "long"), [(0.5, 9.0), (3.0, 1.0), (0.0, 0.0)])
def test_restarted_server_counts_from_zero(short: float, long: float) -> None:
    spent, outlook = BusySplit(), Outlook(Learnt())
    spent.since(10.0, 0.9, ByClass(short=1.0, long=5.0), outlook)
    assert spent.since(12.0, 0.9, ByClass(short=short, long=long), outlook) == (0.0, 0.0)
    assert spent.since(14.0, 0.9, ByClass(short=short + 0.5, long=long + 1.0), outlook) == (0.25, 0.5)


def test_unreported_busy_time_is_split_like_own_work() -> None:
    spent, outlook = BusySplit(), Outlook(Learnt())
    assert spent.since(1.0, 0.5, None, outlook) == (0.25, 0.25), "nothing is known"
    outlook.enter(1.0, "short", 3.0)
    outlook.enter(1.0, "long", 1.0)
    assert spent.since(2.0, 0.5, None, outlook) == (0.375, 0.125), "what waits"
    outlook.leave(2.0, "short", 3.0, 10)
    assert spent.since(3.0, 0.5, None, outlook) == (0.5, 0.0), "what was done"
    outlook.enter(3.0, "short", 1.0)
    outlook.leave(4.0, "short", 1.0, 10)
    outlook.leave(4.0, "long", 1.0, 10)
    assert spent.since(5.0, 0.5, None, outlook) == (0.25, 0.25)
    outlook.enter(5.0, "short", 6.0)
    assert spent.since(6.0, 0.5, None, outlook) == (0.5, 0.0), "nothing was done since: what waits"
    outlook.enter(6.0, "short", 1.0)
    outlook.enter(6.0, "long", 1.0)
    outlook.leave(7.0, "short", 1.0, 10)
    outlook.leave(7.0, "long", 1.0, 10)
    assert spent.since(7.0, 0.5, None, outlook) == (0.25, 0.25), "as much of either"


@pytest.mark.parametrize("steady", [6, 9, 12, 15])
def test_change_is_located_among_kept_samples(steady: int) -> None:
    """The change can be anywhere in the kept samples."""
    demand, _ = feed_demand((1.0 + 0.1 * (i % 2), 0.5) for i in range(40))
    demand, changes = feed_demand(((2.0 + 0.1 * (i % 2), 0.5) for i in range(steady)), demand, 40)
    assert changes
    assert demand.span_s == pytest.approx(steady)
    assert demand.servers().short == pytest.approx(2.05, abs=0.02)


def test_small_change_is_found_after_some_samples() -> None:
    demand, _ = feed_demand((1.0 + 0.1 * (i % 2), 0.5) for i in range(40))
    demand, changes = feed_demand(((1.4 + 0.1 * (i % 2), 0.5) for i in range(6)), demand, 40)
    assert changes
    assert 40 < changes[0] < 46


def test_change_does_not_inflate_noise() -> None:
    demand, _ = feed_demand((1.0 + 0.1 * (i % 2), 0.5) for i in range(40))
    before = demand.error().short
    demand, _ = feed_demand(((5.0 + 0.1 * (i % 2), 0.5) for i in range(19)), demand, 40)
    # Assumption: the variance is proportional to the work.
    assert demand.error().short == pytest.approx(before * 5**0.5, rel=0.3)


def test_noise_is_clipped_only_after_first_samples() -> None:
    def after(differences: int) -> float:
        """Return the error if one more difference is large."""
        demand = Demand(AllocConfig(interval_s=PERIOD_S))
        for i in range(differences + 3):
            work = Work(10.0 if i == differences + 2 else 1.0 + 0.1 * (i % 2), 0.0)
            demand.observe(float(i), [InstanceSignals(name="a", pool="long", busy=work)])
        return demand.error().short

    assert after(FIRST - 1) > 4 * after(FIRST)
    assert after(FIRST) == pytest.approx(after(FIRST + 1), rel=0.1)
