"""Orders inside a class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.config import ConfigError
from laps_core.scheduling.order import ORDERS, Work, order_named, slack_s, sorted_by
from laps_core.scheduling.waiting import Waiting

NOW = 100.0
Job = tuple[Waiting, Work]


def job(since_s: float, deadline_s: float | None, left_s: float, whole_s: float) -> Job:
    return Waiting(100, 0, since_s, deadline_s), Work(left_s, whole_s)


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


def order(name: str, jobs: list[Job]) -> list[int]:
    return sorted_by(order_named(name), [w for w, _ in jobs], [work for _, work in jobs], NOW)


def test_an_unknown_order_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'lifo'; known: fcfs, edf, lars, s-edf"):
        order_named("lifo")


@pytest.mark.parametrize("name", list(ORDERS))
@given(JOBS)
def test_every_order_serves_each_once_and_ties_by_arrival(name: str, jobs: list[Job]) -> None:
    got = order(name, jobs)
    assert sorted(got) == list(range(len(jobs)))
    same = [job(a, 105.0, 1.0, 2.0) for a in (99.0, 97.0, 98.0)]
    assert order(name, same) == [1, 2, 0]


@given(JOBS)
def test_edf_serves_who_can_make_it_then_open_ended_then_late(jobs: list[Job]) -> None:
    got = [jobs[i] for i in order("edf", jobs)]
    rank = [1 if w.deadline_s is None else 2 if slack_s(w, work, NOW) < 0 else 0 for w, work in got]
    assert rank == sorted(rank)
    in_time = [w.deadline_s or 0.0 for (w, _), r in zip(got, rank, strict=True) if r == 0]
    assert in_time == sorted(in_time)


@given(JOBS)
def test_s_edf_is_the_formula_of_the_paper(jobs: list[Job]) -> None:
    def priority(w: Waiting, work: Work) -> float:
        slack = slack_s(w, work, NOW)
        return 0.0 if w.deadline_s is None else ((slack > 0) - (slack < 0)) / w.deadline_s

    got = [priority(*jobs[i]) for i in order("s-edf", jobs)]
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
