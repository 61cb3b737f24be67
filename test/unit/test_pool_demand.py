"""Estimate of the arriving work, its error, and detection of changes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from laps_core.pools.demand import FIRST, MOST_PERIODS, BusySplit, Demand
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.pressure import InstanceSignals, PressureConfig, Work
from laps_core.protocol import ByClass

PERIOD_S = 5.0
SAMPLES = 5
"""Samples in a period."""


def fed(work: Iterable[tuple[float, float]], demand: Demand | None = None, since: int = 0) -> tuple[Demand, list[int]]:
    """Return a demand after these samples of (short, long) work in servers, and the samples with detected changes."""
    demand, changes = demand or Demand(PressureConfig(period_s=PERIOD_S)), []
    for i, (short, long) in enumerate(work, since):
        demand.observe(float(i), [InstanceSignals(name="a", pool="long", busy=Work(short, long))])
        if demand.drop_before_change():
            changes.append(i)
    return demand, changes


def by_chance(rng: random.Random, requests: float, n: int) -> list[float]:
    """Return the work in ``n`` samples with Poisson arrivals: ``requests`` on average, each a tenth of a server."""
    found = []
    for _ in range(n):
        at, came = rng.expovariate(requests), 0
        while at < 1.0:
            at, came = at + rng.expovariate(requests), came + 1
        found.append(came / 10)
    return found


def test_uncounted_requests_are_estimated_from_the_busy_time_of_the_server() -> None:
    demand = Demand(PressureConfig(period_s=PERIOD_S))
    for t in range(6):
        demand.observe(t, [InstanceSignals(name="a", pool="long", busy=Work(0.2, 0.8), waiting=Work(0.0, 2.0 * t))])
    assert demand.servers() == (pytest.approx(0.2), pytest.approx(0.8))


def test_the_end_of_a_long_prompt_takes_no_work_away() -> None:
    demand = Demand(PressureConfig(period_s=PERIOD_S))
    for t in range(111):
        waits = Work(0.0, 100.0 if t < 100 else 0.0)
        busy = Work(0.0, 1.0 if t <= 100 else 0.0)
        signals = [InstanceSignals(name=f"l{i}", pool="long", busy=busy, waiting=waits) for i in range(3)]
        came = demand.observe(float(t), signals)
        assert min(came) >= 0.0
        assert max(came) <= 3.0


def known(t: int, arrived: Work, busy: Work, waiting: Work = Work()) -> list[InstanceSignals]:  # noqa: B008
    return [InstanceSignals(name="a", pool="both", arrived=arrived, busy=busy, waiting=waiting)]


def test_what_comes_is_what_was_predicted_corrected_by_what_it_took() -> None:
    demand = Demand(PressureConfig(period_s=PERIOD_S))
    for t in range(200):
        came = demand.observe(float(t), known(t, Work(0.1, 0.4), Work(0.2, 0.3)))
    assert came == (pytest.approx(0.2, rel=0.1), pytest.approx(0.3, rel=0.02))
    # More arrives than the server does; the time per work is known from before.
    for t in range(200, 300):
        came = demand.observe(float(t), known(t, Work(0.1, 4.0), Work(0.2, 0.8), Work(0.0, 3.0 * (t - 199))))
    assert came == (pytest.approx(0.2, rel=0.1), pytest.approx(3.0, rel=0.02))


def test_what_others_send_to_a_server_that_does_not_tell_counts_too() -> None:
    demand = Demand(PressureConfig(period_s=PERIOD_S))
    for t in range(100):
        came = demand.observe(float(t), known(t, Work(0.0, 0.01), Work(0.5, 0.3)))
    assert came == (pytest.approx(0.5), pytest.approx(0.3, rel=0.02))


def test_one_sick_instance_does_not_make_up_the_demand() -> None:
    demand = Demand(PressureConfig(period_s=PERIOD_S))
    for t in range(6):
        signals = [InstanceSignals(name=f"l{i}", pool="long", waiting=Work(0.0, 1e6 * t * (not i))) for i in range(4)]
        demand.observe(t, signals)
    assert demand.servers().long <= 1.0 + 0.2


def test_steady_work_is_averaged_for_longer_than_a_period() -> None:
    demand, changes = fed([(1.0, 2.0)] * 60)
    assert demand.servers() == (pytest.approx(1.0), pytest.approx(2.0))
    assert (demand.span_s, changes) == (MOST_PERIODS * PERIOD_S, [])
    assert demand.error().long < 0.01


@pytest.mark.parametrize("requests", [0.5, 4.0, 70.0])
def test_chance_is_no_change(requests: float) -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(20):
        short, long = (by_chance(rng, r, 100) for r in (requests, requests / 3))
        found += len(fed(zip(short, long, strict=True))[1])
    assert found <= 20, "of 2000 samples"


@pytest.mark.parametrize("requests", [4.0, 70.0])
def test_the_error_is_what_chance_makes_it(requests: float) -> None:
    rng = random.Random(5)
    misses = []
    for _ in range(60):
        short = by_chance(rng, requests, 60)
        demand, _ = fed((s, 0.0) for s in short)
        misses.append(abs(demand.servers().short - requests / 10) / demand.error().short)
    assert 0.4 < sorted(misses)[30] < 1.0, "half of them within about two thirds of the error"


def test_after_a_change_only_what_came_since_counts() -> None:
    for before, after in (((28.8, 9.6), (1.4, 37.0)), ((1.4, 37.0), (28.8, 9.6)), ((3.0, 1.0), (3.0, 0.0))):
        demand, changes = fed([before] * 40 + [after] * 3)
        assert changes
        assert demand.servers() == (pytest.approx(after[0]), pytest.approx(after[1]))
        assert demand.span_s <= 3.0


def test_what_changes_all_the_time_is_noise() -> None:
    swings = [(8.0, 1.0) if i // 2 % 2 else (1.0, 8.0) for i in range(200)]
    _, changes = fed(swings)
    assert not [at for at in changes if at > 3 * FIRST]


def test_a_server_that_tells_its_classes_apart_is_believed() -> None:
    spent, outlook = BusySplit(), Outlook(Learnt())
    assert spent.since(10.0, 0.9, ByClass(short=1.0, long=5.0), outlook) == (0.0, 0.0), "nobody knows since when"
    assert spent.since(12.0, 0.9, ByClass(short=1.5, long=6.5), outlook) == (0.25, 0.75)
    assert spent.since(12.0, 0.9, ByClass(short=1.5, long=6.5), outlook) == (0.25, 0.75), "the same answer again"
    assert spent.since(14.0, 0.9, ByClass(short=1.5, long=7.5), outlook) == (0.0, 0.5), "one class has nothing"
    assert spent.since(18.0, 0.9, ByClass(short=3.5, long=7.5), outlook) == (0.5, 0.0)


def test_after_missed_answers_the_work_is_that_of_all_the_time_since() -> None:
    spent, outlook = BusySplit(), Outlook(Learnt())
    spent.since(10.0, 0.9, ByClass(short=1.0, long=5.0), outlook)
    assert spent.since(16.0, 0.9, ByClass(short=1.0, long=10.4), outlook) == (0.0, pytest.approx(0.9))


def test_a_device_is_never_busy_for_more_than_the_time_and_no_time_is_lost() -> None:
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
def test_a_server_that_was_started_again_counts_from_nothing(short: float, long: float) -> None:
    spent, outlook = BusySplit(), Outlook(Learnt())
    spent.since(10.0, 0.9, ByClass(short=1.0, long=5.0), outlook)
    assert spent.since(12.0, 0.9, ByClass(short=short, long=long), outlook) == (0.0, 0.0)
    assert spent.since(14.0, 0.9, ByClass(short=short + 0.5, long=long + 1.0), outlook) == (0.25, 0.5)


def test_of_one_that_does_not_its_busy_time_is_divided_as_this_routers_work_is() -> None:
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
def test_a_change_is_found_where_it_lies(steady: int) -> None:
    """The change can be anywhere in the kept samples."""
    demand, _ = fed((1.0 + 0.1 * (i % 2), 0.5) for i in range(40))
    demand, changes = fed(((2.0 + 0.1 * (i % 2), 0.5) for i in range(steady)), demand, 40)
    assert changes
    assert demand.span_s == pytest.approx(steady)
    assert demand.servers().short == pytest.approx(2.05, abs=0.02)


def test_a_change_of_a_few_times_the_noise_is_found_after_some_samples() -> None:
    demand, _ = fed((1.0 + 0.1 * (i % 2), 0.5) for i in range(40))
    demand, changes = fed(((1.4 + 0.1 * (i % 2), 0.5) for i in range(6)), demand, 40)
    assert changes
    assert 40 < changes[0] < 46


def test_a_change_is_not_taken_for_noise() -> None:
    demand, _ = fed((1.0 + 0.1 * (i % 2), 0.5) for i in range(40))
    before = demand.error().short
    demand, _ = fed(((5.0 + 0.1 * (i % 2), 0.5) for i in range(19)), demand, 40)
    # Assumption: the variance is proportional to the work.
    assert demand.error().short == pytest.approx(before * 5**0.5, rel=0.3)


def test_the_noise_is_learnt_from_the_first_samples_whatever_they_are() -> None:
    def after(differences: int) -> float:
        """Return the error if one more difference is large."""
        demand = Demand(PressureConfig(period_s=PERIOD_S))
        for i in range(differences + 3):
            work = Work(10.0 if i == differences + 2 else 1.0 + 0.1 * (i % 2), 0.0)
            demand.observe(float(i), [InstanceSignals(name="a", pool="long", busy=work)])
        return demand.error().short

    assert after(FIRST - 1) > 4 * after(FIRST)
    assert after(FIRST) == pytest.approx(after(FIRST + 1), rel=0.1)
