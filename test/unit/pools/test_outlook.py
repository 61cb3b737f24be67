"""Expected answer time of a server: from its own model or learned from its answers, and from its queue."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from laps_core.latency.step import Coefficients
from laps_core.length import ClassName
from laps_core.pools.outlook import ENOUGH, Learnt, Outlook

MODEL = Coefficients(alpha=0.0, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.01)


def laps(model: Coefficients = MODEL) -> Outlook:
    made = Outlook(Learnt())
    made.own_model, made.parks = model, True
    return made


def test_cost_on_idle_server_is_step_plus_work() -> None:
    assert laps().cost_s(0.0, 1000, 0, False) == pytest.approx(0.11)
    assert laps().cost_s(0.0, 100, 0, True) == pytest.approx(0.02)


def test_cached_tokens_reduce_cost() -> None:
    model = Coefficients(alpha=1e-8, linear=1e-4, gamma_r=1e-6, per_request=0.0, fixed=0.01)
    assert laps(model).cost_s(0.0, 100, 9900, True) < 0.1 * laps(model).cost_s(0.0, 10_000, 0, False)


def test_short_request_skips_long_work_only_on_parking_server() -> None:
    one = laps()
    one.enter(0.0, "long", 2.0)
    assert one.cost_s(0.0, 30_000, 0, False) > 5.0
    assert one.cost_s(0.0, 100, 0, True) < 0.1
    one.parks = False
    assert one.cost_s(0.0, 100, 0, True) > 2.0


def test_short_request_costs_less_without_delayed_long_prompt() -> None:
    one, two = laps(), laps()
    one.enter(0.0, "long", 2.0)
    two.enter(0.0, "short", 0.005)
    assert two.cost_s(0.0, 100, 0, True) < one.cost_s(0.0, 100, 0, True)


def test_reported_work_of_other_routers_is_added_and_expires() -> None:
    one = laps()
    one.enter(0.0, "long", 1.0)
    one.record_work(0.0, 0.5, 3.0)
    assert one.waiting(0.0) == (0.5, 3.0)
    assert one.waiting(1.0) == (0.0, pytest.approx(2.5))
    assert one.waiting(9.0) == (0.0, 1.0)
    one.leave(9.0, "long", 1.0, 10_000)
    assert one.waiting(9.0) == (0.0, 0.0)


@pytest.mark.parametrize("own_s", [0.0, 0.1])
def test_other_routers_work_counts_regardless_of_own_requests(own_s: float) -> None:
    one = laps()
    if own_s:
        one.enter(1.0, "long", own_s)
    one.record_work(1000.0, 0.0, 3.0 + own_s)
    assert one.cost_s(1000.0, 1000, 0, False) > 3.0


@given(st.lists(st.floats(0.0, 10.0), max_size=30), st.sampled_from(["short", "long"]))
@example([0.1, 0.2, 0.3], "short")
@example([0.1, 0.2, 0.3], "long")
def test_waiting_work_is_zero_after_all_requests_leave(works: list[float], cls: ClassName) -> None:
    one = laps()
    for w in works:
        one.enter(0.0, cls, w)
    for w in works:
        one.leave(1.0, cls, w, 1)
    assert one.waiting(1.0) == (0.0, 0.0)


def test_latency_model_is_learned_from_lone_requests() -> None:
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


def test_requests_of_one_length_teach_rate_only() -> None:
    learnt = Learnt()
    one = Outlook(learnt)
    for i in range(50):
        one.enter(float(i), "long", 0.1)
        one.leave(i + 0.5, "long", 0.1, 1000)
    assert (learnt.model.linear, learnt.model.fixed) == (pytest.approx(5e-4), pytest.approx(0.0))


def test_cost_adds_running_step_and_waiting_work() -> None:
    """``MODEL`` takes 10 ms per step and 0.1 ms per token."""
    alone, slower = 0.01 + 0.1, 0.01 + 0.01
    one = laps()
    one.enter(5.0, "short", 0.04)
    assert one.cost_s(5.0, 100, 0, True) == pytest.approx(0.01 + slower + 0.01), "the running batch waits"
    assert one.cost_s(5.0, 1000, 0, False) == pytest.approx(0.04 + 0.01 + alone)
    assert one.cost_s(5.03, 1000, 0, False) == pytest.approx(0.01 + 0.01 + alone), "a part of the work is over"
    assert one.cost_s(9.0, 1000, 0, False) == pytest.approx(0.01 + alone), "nothing waits for less than nothing"
    one.enter(9.0, "long", 2.0)
    delays = 2 * 0.01 + 0.01
    assert one.cost_s(9.0, 100, 0, True) == pytest.approx(0.01 + slower + delays), "both wait for the smaller request"
    one.parks = False
    assert one.cost_s(9.0, 100, 0, True) == pytest.approx(2.0 + 0.01 + slower), "the work before should be over"


def test_longer_of_two_requests_waits_for_shorter_on_laps_server() -> None:
    """Three requests of 0.1, 0.2 and 0.4 s wait; a new one waits for those with less work, the rest for the new one."""
    one = laps()
    for work_s in (0.4, 0.1, 0.2):
        one.enter(0.0, "long", work_s)
    assert one.costs_s(0.0, 0.01, 0.3, False) == (pytest.approx(0.1 + 0.2 + 0.3 + 0.02), pytest.approx(0.3))
    assert one.costs_s(0.0, 0.01, 0.05, True) == (pytest.approx(0.05 + 0.02), pytest.approx(3 * 0.05 + 0.01))
    one.leave(0.0, "long", 0.2, 0)
    assert one.costs_s(0.0, 0.01, 0.3, False) == (pytest.approx(0.1 + 0.3 + 0.02), pytest.approx(0.3))
    one.parks = False
    assert one.costs_s(0.0, 0.01, 0.3, False) == (pytest.approx(0.5 + 0.3 + 0.02), 0.0), "in order of arrival"


def test_infinite_work_has_infinite_cost() -> None:
    one = laps(Coefficients(alpha=1e300, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.01))
    one.enter(0.0, "short", 0.04)
    assert one.cost_s(0.0, 100_000, 0, False) == math.inf
    assert one.cost_s(0.0, 100_000, 100_000, False) == math.inf


def test_other_routers_short_work_expires_before_long_work() -> None:
    one = laps()
    one.record_work(1.0, 0.25, 1.0)
    assert one.waiting(1.125) == (0.125, 1.0)
    assert one.cost_s(1.125, 100, 0, True) == pytest.approx(0.125 + 3 * 0.01 + 2 * 0.01)
    one.record_work(1.0, 0.25, 0.0)
    assert one.waiting(1.0) == (0.25, 0.0), "of one class alone"
    one.record_work(1.0, 0.0, 0.25)
    assert one.waiting(1.0) == (0.0, 0.25)


def test_work_of_unknown_class_is_classified_by_pool() -> None:
    one = laps()
    one.record_others_work(0.0, "short", 0.5)
    assert one.waiting(0.0) == (0.5, 0.0)
    one.record_others_work(0.0, "long", 0.5)
    assert one.waiting(0.0) == (0.0, 0.5)
    one.record_others_work(0.0, "both", 0.5)
    assert one.waiting(0.0) == (0.0, 0.5)


def test_finished_work_is_counted_by_class() -> None:
    one = laps()
    for cls, work_s in (("short", 0.5), ("short", 0.25), ("long", 2.0)):
        one.enter(0.0, "short" if cls == "short" else "long", work_s)
    assert one.waiting(0.0) == (0.75, 2.0)
    one.leave(1.0, "short", 0.5, 100)
    assert one.waiting(1.0) == (0.25, 2.0)
    assert one.done == (0.5, 0.0)
    one.leave(1.0, "short", 0.25, 100)
    one.leave(2.0, "long", 2.0, 100)
    assert one.done == (0.75, 2.0)
    one.enter(2.0, "long", 2.0)
    one.enter(2.0, "long", 0.5)
    one.leave(3.0, "long", 0.5, 100)
    assert one.waiting(3.0) == (0.0, 2.0)


def test_concurrent_instant_and_failed_requests_teach_nothing() -> None:
    learnt = Learnt()
    one, before = Outlook(learnt), learnt.model
    one.enter(0.0, "long", 1.0)
    one.enter(0.0, "short", 1.0)
    one.leave(1.0, "short", 1.0, 100)
    one.leave(1.0, "long", 1.0, 1000)
    one.enter(2.0, "long", 1.0)
    one.leave(2.0, "long", 1.0, 1000)
    one.enter(3.0, "short", 1.0)
    one.leave(4.0, "short", 1.0, 0)
    assert learnt.model is before


def test_learned_line_has_no_negative_intercept() -> None:
    learnt = Learnt()
    for tokens, seconds in ((100, 0.001), (4000, 1.0), (100, 0.001), (4000, 1.0)):
        learnt.observe(tokens, seconds)
    assert learnt.model.fixed == pytest.approx(0.0, abs=1e-9)
    assert learnt.model.linear == pytest.approx(2.002 / 8200, rel=1e-3)


def test_older_requests_count_slightly_less() -> None:
    learnt = Learnt()
    learnt.observe(1000, 1.0)
    learnt.observe(1000, 2.0)
    assert learnt.model.linear == pytest.approx((0.999 * 1.0 + 2.0) / (0.999 + 1.0) / 1000, rel=1e-9)


def test_nearly_equal_lengths_teach_rate_only() -> None:
    learnt = Learnt()
    learnt.observe(1000, 1.0)
    learnt.observe(1050, 1.02)
    assert learnt.model.linear == pytest.approx(2.02 / 2050, rel=1e-3)
    assert learnt.model.fixed == pytest.approx(0.0, abs=1e-9)
    for _ in range(100):
        learnt.observe(1000, 1.0)
        learnt.observe(1050, 1.02)
    assert learnt.model.fixed == pytest.approx(0.0, abs=1e-9), "however many there are"


def test_own_work_is_not_counted_as_other_routers_work() -> None:
    one = laps()
    one.enter(0.0, "short", 0.25)
    one.record_work(0.0, 0.75, 0.0)
    one.leave(0.0, "short", 0.25, 100)
    assert one.waiting(0.0) == (0.5, 0.0)


def test_reported_model_replaces_learned_model() -> None:
    learnt = Learnt()
    learnt.observe(1000, 1.0)
    one = Outlook(learnt)
    assert one.model is learnt.model
    one.own_model = MODEL
    assert one.model is MODEL


def test_ttft_is_predicted_from_reported_model() -> None:
    one = laps()
    assert one.first_s(0.0, 1000, 0, False) == pytest.approx(0.11)
    one.enter(0.0, "long", 2.0)
    # The running slice, the step and the request's work, but not the delay of the longer prompt.
    assert one.first_s(0.0, 1000, 0, False) == pytest.approx(0.12)
    assert one.first_s(0.0, 100, 0, True) == pytest.approx(0.03)


def test_ttft_is_predicted_from_learned_model_if_work_waits() -> None:
    learnt = Learnt()
    one, two = Outlook(learnt), Outlook(learnt)
    two.enter(0.0, "long", 5.0)
    for _ in range(ENOUGH):
        assert two.first_s(0.0, 1000, 0, False) is None
        one.enter(0.0, "long", 1.0)
        one.leave(1.0, "long", 1.0, 10_000)
    assert two.first_s(0.0, 1000, 0, False) == pytest.approx(5.1, rel=0.01)
    assert one.first_s(1.0, 1000, 0, False) is None, "the request is one to learn from"


def test_requests_behind_other_routers_work_teach_nothing() -> None:
    """100 tokens behind 10 s of another router's work, reported before the arrival or during the wait."""
    learnt = Learnt()
    one, before = Outlook(learnt), learnt.model
    one.record_others_work(0.0, "long", 10.0)
    one.enter(0.1, "short", 0.01)
    one.leave(10.2, "short", 0.01, 100)
    one.record_others_work(20.0, "long", 0.0)
    one.enter(20.1, "short", 0.01)
    one.record_others_work(21.0, "long", 9.0)
    one.leave(30.2, "short", 0.01, 100)
    one.record_others_work(40.0, "long", 0.0)
    one.set_shared(True)
    one.enter(40.1, "short", 0.01)
    one.leave(50.2, "short", 0.01, 100)
    assert learnt.model is before
    one.set_shared(False)
    one.enter(60.0, "short", 0.01)
    one.leave(60.5, "short", 0.01, 100)
    assert learnt.model.linear == pytest.approx(0.005)


def test_server_is_free_after_own_and_other_routers_work() -> None:
    one = laps()
    assert one.free_at < 0.0
    one.record_work(1.0, 0.25, 1.0)
    assert one.free_at == 2.25
    one.enter(1.5, "short", 0.5)
    assert one.free_at == math.inf
    one.leave(2.0, "short", 0.5, 100)
    assert one.free_at == 2.25
    assert one.cost_s(2.25, 1000, 0, False) == laps().cost_s(0.0, 1000, 0, False) < one.cost_s(2.2, 1000, 0, False)


@pytest.mark.parametrize("parks", [True, False])
def test_silent_server_gains_no_credit_for_new_work(parks: bool) -> None:
    """One long request that was due at 2.01 s is unanswered at 20 s; work sent then takes its time nevertheless."""
    one = laps()
    one.parks = parks
    one.enter(0.0, "long", 2.0)
    delays = 0.1 if parks else 0.0
    for i in range(3):
        assert one.cost_s(20.0, 1000, 0, False) == pytest.approx(i * 0.1 + 0.12 + delays)
        one.enter(20.0, "long", 0.1)
