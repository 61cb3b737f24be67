"""Orders inside a class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.config import ConfigError, LapsConfig
from laps_core.policy.fairness import OLDEST_EVERY, Patience, passes_over
from laps_core.policy.order import ORDERS, line, slack_s
from laps_core.policy.types import Waiting

NOW = 100.0
SIZES: Any = SimpleNamespace(work_s=lambda w: w.tokens * 1e-3, lone_s=lambda w: w.new_tokens * 1e-3)
"""A token takes a millisecond."""


def job(since_s: float, deadline_s: float | None, left_s: float, whole_s: float) -> Waiting:
    return Waiting(round(1e3 * left_s), 0, since_s, deadline_s, round(1e3 * whole_s))


JOBS = st.lists(
    st.builds(
        job,
        st.floats(90, 100),
        st.none() | st.floats(95, 110),
        st.floats(0.001, 3),
        st.floats(0.001, 10),
    ),
    max_size=12,
)


def order(name: str, jobs: list[Waiting]) -> list[int]:
    return line(ORDERS[name], jobs, SIZES, NOW)


@pytest.mark.parametrize("name", list(ORDERS))
def test_every_order_can_be_configured(name: Any) -> None:
    assert LapsConfig(order=name).order == name
    with pytest.raises(ConfigError, match=name):
        LapsConfig(order="lifo")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(ORDERS))
def test_priority_comes_first(name: str) -> None:
    urgent = Waiting(5000, 0, 99.0, None, 5000, priority=-1)
    assert order(name, [job(90.0, 101.0, 0.1, 0.1), urgent]) == [1, 0]


@pytest.mark.parametrize("name", list(ORDERS))
@given(JOBS)
def test_every_order_serves_each_once_and_ties_by_arrival(name: str, jobs: list[Waiting]) -> None:
    got = order(name, jobs)
    assert sorted(got) == list(range(len(jobs)))
    same = [job(a, 105.0, 1.0, 2.0) for a in (99.0, 97.0, 98.0)]
    assert order(name, same) == [1, 2, 0]


@given(JOBS)
def test_edf_serves_who_can_make_it_then_open_ended_then_late(jobs: list[Waiting]) -> None:
    got = [jobs[i] for i in order("edf", jobs)]
    rank = [1 if w.deadline_s is None else 2 if slack_s(w, SIZES.work_s(w), NOW) < 0 else 0 for w in got]
    assert rank == sorted(rank)
    in_time = [w.deadline_s or 0.0 for w, r in zip(got, rank, strict=True) if r == 0]
    assert in_time == sorted(in_time)


@given(JOBS)
def test_s_edf_is_the_formula_of_the_paper(jobs: list[Waiting]) -> None:
    def priority(w: Waiting) -> float:
        slack = slack_s(w, SIZES.work_s(w), NOW)
        return 0.0 if w.deadline_s is None else ((slack > 0) - (slack < 0)) / w.deadline_s

    got = [priority(jobs[i]) for i in order("s-edf", jobs)]
    assert got == sorted(got, reverse=True)


def test_lars_weighs_slack_by_length() -> None:
    short = job(0.0, NOW + 2.0, 0.5, 0.5)  # slack 1.5 s, three times its work
    long = job(0.0, NOW + 12.0, 8.0, 10.0)  # slack 4 s, under half its work
    assert order("lars", [short, long]) == [1, 0]
    assert order("edf", [short, long]) == [0, 1]


def test_lars_lets_a_late_request_gain_and_an_open_ended_one_wait() -> None:
    late, urgent, open_ended = job(0, NOW - 1, 1, 1), job(0, NOW + 1.1, 1, 1), job(0, None, 1, 1)
    assert order("lars", [open_ended, urgent, late]) == [2, 1, 0]
    assert order("edf", [open_ended, urgent, late]) == [1, 0, 2]


def test_who_can_just_make_it_is_in_time() -> None:
    just, open_ended = job(0.0, NOW + 1.0, 1.0, 1.0), job(0.0, None, 1.0, 1.0)
    assert order("edf", [open_ended, just]) == [1, 0]


def test_somebody_older_who_stays_behind_is_passed_over() -> None:
    waiting = [Waiting(100, 0, since_s) for since_s in (3.0, 1.0, 2.0, 1.0)]
    for picked, passed in (
        ((), False),
        ((1,), False),
        ((1, 3), False),
        ((2,), True),
        ((1, 2), True),
        ((1, 3, 2), False),
    ):
        assert passes_over(waiting, picked) == passed
    assert not passes_over(waiting, range(4))


def test_patience_ends_after_so_many_turns() -> None:
    patience = Patience()
    for _ in range(3):
        for _ in range(OLDEST_EVERY - 1):
            assert not patience.due
            patience.served(True)
        assert patience.due
        patience.served(True)
    for _ in range(3 * OLDEST_EVERY):
        patience.served(True)
        patience.served(False)
        assert not patience.due
