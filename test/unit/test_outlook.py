"""When a server would answer: by its own model, or by what was seen of it; by what waits there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.latency.step import Coefficients
from laps_core.pools.outlook import Learnt, Outlook

MODEL = Coefficients(alpha=0.0, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.01)


def laps(model: Coefficients = MODEL) -> Outlook:
    made = Outlook(Learnt())
    made.own_model, made.parks = model, True
    return made


def test_an_idle_server_takes_the_time_of_the_request_alone() -> None:
    assert laps().cost_s(0.0, 1000, 0, False) == pytest.approx(0.11)
    assert laps().cost_s(0.0, 100, 0, True) == pytest.approx(0.02)


def test_what_is_cached_is_not_computed() -> None:
    model = Coefficients(alpha=1e-8, linear=1e-4, gamma_r=1e-6, per_request=0.0, fixed=0.01)
    assert laps(model).cost_s(0.0, 100, 9900, True) < 0.1 * laps(model).cost_s(0.0, 10_000, 0, False)


def test_long_work_waits_for_all_and_short_work_for_little_of_the_long() -> None:
    one = laps()
    one.enter(0.0, "long", 2.0)
    assert one.cost_s(0.0, 1000, 0, False) > 2.0
    assert one.cost_s(0.0, 100, 0, True) < 0.1
    one.parks = False
    assert one.cost_s(0.0, 100, 0, True) > 2.0


def test_a_short_request_rather_goes_where_it_delays_no_long_one() -> None:
    one, two = laps(), laps()
    one.enter(0.0, "long", 2.0)
    two.enter(0.0, "short", 0.005)
    assert two.cost_s(0.0, 100, 0, True) < one.cost_s(0.0, 100, 0, True)


def test_what_others_sent_is_told_and_passes() -> None:
    one = laps()
    one.enter(0.0, "long", 1.0)
    one.told(0.0, 0.5, 3.0)
    assert one.waiting(0.0) == (0.5, 3.0)
    assert one.waiting(1.0) == (0.0, pytest.approx(2.5))
    assert one.waiting(9.0) == (0.0, 1.0)
    one.leave(9.0, "long", 1.0, 10_000)
    assert one.waiting(9.0) == (0.0, 0.0)


@given(st.lists(st.floats(0.0, 10.0), max_size=30))
def test_what_has_come_and_gone_leaves_nothing(works: list[float]) -> None:
    one = laps()
    for w in works:
        one.enter(0.0, "short", w)
    for w in works:
        one.leave(1.0, "short", w, 1)
    assert one.waiting(1.0) == (0.0, 0.0)


def test_a_server_that_says_nothing_is_known_by_requests_that_were_alone_there() -> None:
    learnt = Learnt()
    one, now = Outlook(learnt), 0.0
    for i in range(200):
        tokens = 100 if i % 2 else 4000
        one.enter(now, "short", 0.0001)
        now += 0.02 + tokens * 5e-5
        one.leave(now, "short", 0.0001, tokens)
    assert learnt.model.fixed == pytest.approx(0.02, rel=0.05)
    assert learnt.model.linear == pytest.approx(5e-5, rel=0.05)
    assert Outlook(learnt).cost_s(now, 4000, 0, False) == pytest.approx(0.22, rel=0.05), "of others like it"


def test_requests_of_one_length_teach_a_rate() -> None:
    learnt = Learnt()
    one = Outlook(learnt)
    for i in range(50):
        one.enter(float(i), "long", 0.1)
        one.leave(i + 0.5, "long", 0.1, 1000)
    assert (learnt.model.linear, learnt.model.fixed) == (pytest.approx(5e-4), pytest.approx(0.0))
