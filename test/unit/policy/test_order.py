"""Orders within a class."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.config import ConfigError, LapsConfig
from laps_core.policy.order import ORDERS, in_time, service_order, short_turns, slack_s
from laps_core.policy.types import Paused, Waiting

NOW = 100.0
SIZES: Any = SimpleNamespace(work_s=lambda w: w.tokens * 1e-3, lone_s=lambda w: w.new_tokens * 1e-3)
"""Sizes with one millisecond per token."""


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
    return service_order(ORDERS[name], jobs, SIZES, NOW)


@pytest.mark.parametrize("name", list(ORDERS))
def test_every_order_can_be_configured(name: Any) -> None:
    assert LapsConfig(order=name).order == name
    with pytest.raises(ConfigError, match=name):
        LapsConfig(order="lifo")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(ORDERS))
def test_higher_priority_goes_first_in_every_order(name: str) -> None:
    urgent = Waiting(5000, 0, 99.0, None, 5000, priority=-1)
    assert order(name, [job(90.0, 101.0, 0.1, 0.1), urgent]) == [1, 0]


@pytest.mark.parametrize("name", list(ORDERS))
@given(JOBS)
def test_orders_serve_each_prompt_once_and_ties_by_arrival(name: str, jobs: list[Waiting]) -> None:
    got = order(name, jobs)
    assert sorted(got) == list(range(len(jobs)))
    same = [job(a, 105.0, 1.0, 2.0) for a in (99.0, 97.0, 98.0)]
    assert order(name, same) == [1, 2, 0]


@given(JOBS)
def test_s_edf_follows_flowprefill_formula(jobs: list[Waiting]) -> None:
    def priority(w: Waiting) -> float:
        slack = slack_s(w, SIZES.work_s(w), NOW)
        return 0.0 if w.deadline_s is None else ((slack > 0) - (slack < 0)) / w.deadline_s

    got = [priority(jobs[i]) for i in order("s-edf", jobs)]
    assert got == sorted(got, reverse=True)


def test_lars_weighs_slack_by_length() -> None:
    short = job(0.0, NOW + 2.0, 0.5, 0.5)  # slack 1.5 s, three times its work
    long = job(0.0, NOW + 12.0, 8.0, 10.0)  # slack 4 s, under half its work
    assert order("lars", [short, long]) == [1, 0]
    assert order("s-edf", [short, long]) == [0, 1]


def test_lars_puts_late_prompts_first_and_open_ended_last() -> None:
    late, urgent, open_ended = job(0, NOW - 1, 1, 1), job(0, NOW + 1.1, 1, 1), job(0, None, 1, 1)
    assert order("lars", [open_ended, urgent, late]) == [2, 1, 0]
    assert order("s-edf", [open_ended, urgent, late]) == [1, 0, 2]


def due(work_s: float, deadline_s: float | None) -> Waiting:
    return job(90.0, None if deadline_s is None else NOW + deadline_s, work_s, work_s)


def test_least_work_serves_timely_then_open_ended_then_late() -> None:
    jobs = [due(0.5, None), due(2.0, 3.0), due(0.1, -1.0), due(0.4, None), due(0.5, 1.0)]
    assert order("least-work", jobs) == [4, 1, 3, 0, 2]


def test_least_work_puts_largest_last_if_deadlines_conflict() -> None:
    jobs = [due(1.9, 2.0), due(0.5, 2.5), due(0.5, 2.6), due(0.5, 2.7)]
    assert order("least-work", jobs) == [1, 2, 3, 0]
    assert order("s-edf", jobs) == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(-1.0, 6.0)), max_size=7))
def test_in_time_maximizes_number_of_met_deadlines(spec: list[tuple[float, float]]) -> None:
    jobs = [due(work_s, deadline_s) for work_s, deadline_s in spec]
    works = [SIZES.work_s(w) for w in jobs]

    def ends(chosen: Sequence[int]) -> bool:
        end = NOW
        for i in sorted(chosen, key=lambda i: jobs[i].deadline_s or 0.0):
            end += works[i]
            if end > (jobs[i].deadline_s or 0.0):
                return False
        return True

    found = in_time(jobs, works, NOW)
    assert ends(found)
    everything = range(len(jobs))
    assert not any(ends(c) for c in combinations(everything, len(found) + 1))


BEFORE: dict[str, list[int]] = {"least-work": [2, 0], "fcfs": [], "s-edf": [0], "lars": [0]}
"""Prompts that go before the paused batch in the next test, by order."""


@pytest.mark.parametrize("name", ORDERS)
def test_service_order_lists_only_prompts_before_paused_batch(name: str) -> None:
    jobs = [due(1.0, 1.5), due(6.0, None), due(0.5, None)]
    paused = Paused(3.0, 1, deadlines=(NOW + 9.0,) if name != "least-work" else ())
    assert service_order(ORDERS[name], jobs, SIZES, NOW, paused) == BEFORE[name]


@pytest.mark.parametrize(("deadline_s", "turns"), [(1.6, [0, 1, 2]), (1.4, [1, 0, 2])])
def test_deadlines_change_least_work_order_only_if_needed(deadline_s: float, turns: list[int]) -> None:
    """In both cases the first has half a second of work and no deadline; the last is late in any order."""
    jobs = [due(0.5, None), due(1.0, deadline_s), due(0.4, 0.1)]
    assert service_order(ORDERS["least-work"], jobs, SIZES, NOW) == turns


@pytest.mark.parametrize(("budget", "guard", "turns"), [
    (1000, 0.15, [0, 1, 2, 3, 4]),  # all fit
    (999, 0.4, [0, 1, 4, 3, 2]),  # 0.4 of a batch holds the first two
    (999, 0.3, [0, 4, 3, 1, 2]),
    (999, 0.1, [0, 4, 3, 1, 2]),  # the oldest has its turn, however large
    (999, 0.0, [4, 3, 1, 0, 2]),
])  # fmt: skip
def test_short_requests_beyond_one_batch_go_by_least_work_after_oldest(
    budget: int, guard: float, turns: list[int]
) -> None:
    shorts = [Waiting(tokens, 0, float(i)) for i, tokens in enumerate((210, 185, 400, 150, 55))]
    assert short_turns(ORDERS["least-work"], shorts, SIZES, NOW, budget, guard) == turns
    assert short_turns(ORDERS["fcfs"], shorts, SIZES, NOW, budget, guard) == [0, 1, 2, 3, 4]


def test_short_requests_beyond_one_batch_go_by_priority() -> None:
    shorts = [Waiting(100, 0, 2.0, priority=0), Waiting(200, 0, 1.0, priority=0), Waiting(50, 0, 0.0, priority=1)]
    assert short_turns(ORDERS["least-work"], shorts, SIZES, NOW, 300, 0.1) == [0, 1, 2]
