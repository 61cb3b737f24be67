"""Times at which the controller decides, for any irregularity of the timer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import Move, PoolController
from laps_core.pools.pressure import InstanceSignals, Work
from laps_core.protocol import Load

PERIOD_S, SAMPLE_S = 5.0, 1.0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of times at which a decision was requested."""
    times: list[float] = []

    def decide(_: PoolController, now: float) -> list[Move]:
        times.append(now)
        return []

    monkeypatch.setattr(PoolController, "decide", decide)
    return times


def loop(start_s: float = 0.0) -> PoolController:
    return PoolController(AllocConfig(interval_s=PERIOD_S), start_s)


def test_each_period_decides_at_sample_nearest_to_period_end(asked: list[float]) -> None:
    made = loop(100.0)
    for i in range(21):
        made.step(100.0 + i * SAMPLE_S + (0.4 if i % 2 else -0.4), [])
    assert asked == [pytest.approx(100.0 + t) for t in (5.4, 9.6, 15.4, 19.6)]


def test_skipped_samples_do_not_cause_consecutive_decisions(asked: list[float]) -> None:
    made = loop()
    for now in (0.0, 33.0, 34.0, 34.9, 35.5, 36.0, 40.6):
        made.step(now, [])
    assert asked == [33.0, 35.5, 40.6]


def test_every_sample_decides_for_three_periods_after_work_change(asked: list[float]) -> None:
    made = loop()
    for now in range(90):
        work = Work(0.1, 0.8) if now < 60 else Work(0.8, 0.1)
        made.step(float(now), [InstanceSignals(name="a", pool="both", busy=work)])
    # The change began at 59 s and was detected two samples later.
    assert [t for t in asked if t >= 55.0] == [55.0, 60.0, *map(float, range(61, 76)), 80.0, 85.0]


@given(st.lists(st.floats(0.01, 30.0), max_size=60))
def test_decisions_keep_minimum_interval_for_any_timer(gaps: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        times: list[float] = []

        def decide(_: PoolController, now: float) -> list[Move]:
            times.append(now)
            return []

        patch.setattr(PoolController, "decide", decide)
        made, now = loop(), 0.0
        for gap in gaps:
            now += gap
            made.step(now, [])
    assert all(b - a >= (PERIOD_S - SAMPLE_S) / 2 - 1e-9 for a, b in itertools.pairwise(times))


def test_step_returns_single_move_to_overloaded_pool() -> None:
    made = PoolController(AllocConfig(interval_s=PERIOD_S, initial_short=1))
    busy = Load(backlog_tokens=50_000, slo_deviation=0.0, busy_share=0.0)
    signals = [InstanceSignals(name="a", pool="short", load=busy, busy=Work(1.0, 0.0))]
    signals += [InstanceSignals(name=name, pool="long") for name in "bc"]
    moves = [made.step(float(now), signals) for now in range(9)]
    assert [m.target for beat in moves for m in beat] == ["short"]
