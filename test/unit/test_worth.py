"""Choice for short requests between their own batch and waiting for a step to share."""

from __future__ import annotations

import pytest
from laps_core.length import LONG, SHORT
from laps_core.policy.exchange import AHEAD
from laps_core.policy.fairness import MANY
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import Paused, Plan, Waiting
from pacers import CHUNK, GAP, TOKEN, F, ended, launch, long, pacer, short, spend

LONE = F + 50 * TOKEN
"""Time of a short request alone (seconds)."""


# -- in the middle of a long batch


def waits(me: Pacer, left_s: float, others: int, *, weight: float = 0.0, now: float = 1.0, tokens: int = 300) -> Plan:
    """Return the plan for one short request, ``others`` waiting long prompts, and a paused batch."""
    paused = Paused(left_s, 1, weight=weight)
    return me.plan(now, [short("a", arrival=now)], [long(tokens, now)] * others, paused=paused)


def test_a_short_request_preempts_what_would_keep_it_longer_than_the_step_is_worth_to_others() -> None:
    lone = F + 300 * TOKEN
    for others in (1, 10, 40):
        enough = others / lone * F * AHEAD * LONE
        assert waits(pacer(), 1.001 * enough, others).order[:1] == (SHORT,)
        assert waits(pacer(), 0.999 * enough, others).order[:1] != (SHORT,)


def test_those_who_have_more_to_prefill_lose_less() -> None:
    assert waits(pacer(), 0.15, 40, tokens=300).order[:1] != (SHORT,)
    assert waits(pacer(), 0.15, 40, tokens=6000).order[:1] == (SHORT,)


def test_those_in_the_paused_batch_lose_the_whole_short_one() -> None:
    enough = 5.0 * LONE * LONE
    assert waits(pacer(), 1.001 * enough, 0, weight=5.0).order[:1] == (SHORT,)
    assert waits(pacer(), 0.999 * enough, 0, weight=5.0).order[:1] != (SHORT,)


def test_a_deadline_that_the_batch_would_make_it_miss_counts_more() -> None:
    me, now = pacer(), 1.0
    spend(me.gap, now - 2 * MANY * GAP)
    for slack, first in ((0.5, LONG), (0.03, SHORT)):
        one = [short("a", arrival=now, deadline=now + LONE + slack)]
        plan = me.plan(now, one, [long(300, now)] * 400, paused=Paused(0.1, 1, weight=1.0))
        assert (plan.order[:1] == (SHORT,)) == (first is SHORT)


def test_while_a_steps_fixed_time_is_not_known_it_preempts() -> None:
    assert waits(pacer(known=False), 0.001, 400).order[:1] == (SHORT,)


def test_a_higher_priority_asks_for_no_price() -> None:
    paused = Paused(0.001, 1, weight=100.0)
    assert pacer().plan(1.0, [short("a")], [long(300)] * 400, urgent=SHORT, paused=paused).order[:1] == (SHORT,)


# -- at the start of a long batch


def test_a_short_request_shares_the_step_of_a_long_prompt_that_costs_it_little() -> None:
    """With one long prompt: sharing delays the short request by the prompt's work. It saves the prompt F, which counts
    AHEAD times, and saves later arrivals F, which counts AHEAD - 1 times."""
    near = next(n for n in range(CHUNK) if (n * TOKEN - (AHEAD - 1.0) * F) * (F + n * TOKEN) > F * AHEAD * LONE)
    plan = pacer().plan(1.0, [short("a")], [long(near - 1)])
    assert (plan.mixed, plan.order[0], plan.picked, plan.long.picked) == (True, LONG, (0,), (0,))
    assert plan.long.tokens == near - 1 + 50
    assert pacer().plan(1.0, [short("a")], [long(near)]).order == (SHORT, LONG)


def many(n: int = 60) -> list[Waiting]:
    """Return long prompts that are nearly short."""
    return [long(260, 1.0)] * n


def test_the_more_wait_the_longer_the_step_that_is_shared() -> None:
    def plan(behind: int) -> Plan:
        return pacer(chunk=4096).plan(1.0, [short("a")], [long(800, 0.5), *[long(4000, 1.0)] * behind])

    assert not plan(2).mixed
    assert plan(60).mixed
    assert plan(60).long.layers > 0, "it makes way for those that come later"


def test_the_step_is_shared_where_both_find_room() -> None:
    for chunk, mixed in ((4 * 56 + 600, True), (4 * 56 + 592, False)):
        plan = pacer(chunk=chunk, unit=8).plan(1.0, [short(i, 50) for i in range(4)], [long(600)] * 90)
        assert plan.mixed == mixed, chunk
        assert plan.long.picked == (0,)
        assert plan.long.tokens == (chunk if mixed else 600)


def test_a_deadline_that_sharing_would_miss_and_a_batch_of_its_own_would_make() -> None:
    def mixed(deadline_s: float) -> bool:
        return pacer(chunk=4096).plan(1.0, [short("a", deadline=1.0 + deadline_s)], many()).mixed

    assert mixed(10.0)
    assert not mixed(LONE + 0.01)
    assert mixed(0.5 * LONE), "it cannot be made at all"


def test_while_the_gap_is_closed_only_what_comes_after_it_counts() -> None:
    """A request could preempt no sooner than the gap's end, so sharing delays it by the rest of the long batch."""
    longs = [long(800)]
    assert not pacer().plan(1.0, [short("a")], longs).mixed
    me = pacer()
    spend(me.gap, 1.0)
    assert me.plan(1.0, [short("a")], longs).mixed
    assert not me.plan(1.0, [short("a")], [long(1200)]).mixed, "half a gap too long"


def test_a_short_request_shares_no_long_step_for_nothing_while_another_preempts() -> None:
    """The overlap loop builds a batch before the previous one has ended, when the end of the gap is unknown."""
    shorts, longs = [short("a")], [long(CHUNK, 1.0)]
    for now in (1.0, 2.0):
        me = pacer(chunk=2 * CHUNK)
        before = me.plan(0.99, shorts, longs)
        spend(me.gap, 0.99 - GAP)
        on_the_device = launch(me, 0.99, before)
        plan = me.plan(now, shorts, longs)
        assert (plan.order, plan.mixed) == ((LONG, SHORT), False)
        assert me.plan(now, shorts, [long(300, 1.0)]).mixed, "this one costs it less than it brings"
        ended(me, on_the_device, 0.99, now)


def test_a_priority_shares_nothing() -> None:
    assert pacer(chunk=4096).plan(1.0, [short("a")], many()).mixed
    for urgent in (SHORT, LONG):
        assert not pacer(chunk=4096).plan(1.0, [short("a")], many(), urgent=urgent).mixed


def test_a_step_that_is_shared_is_no_preemption_and_leaves_the_gap_alone() -> None:
    me = pacer(chunk=4096)
    plan = me.plan(1.0, [short("a")], many())
    assert plan.mixed
    sent = launch(me, 1.0, plan)
    assert not sent.preempts
    ended(me, sent, 1.0, 1.1)
    assert me.preemptions == 0
    assert me.status(2.0)["preemption"]["steps_shared"] == 1
    assert me.gap.opens_at() < 1.0


@pytest.mark.parametrize("since", [0.0, 0.9])
def test_the_books_of_the_guard_follow_what_is_left_of_the_batch(since: float) -> None:
    longs = [long(258, 0.5), long(259, since), *many()]
    plan = pacer(chunk=4096).plan(1.0, [short("a")], longs)
    assert plan.mixed
    assert plan.account.oldest
    assert min(range(len(longs)), key=lambda i: longs[i].since_s) in plan.long.picked


def test_where_many_pay_a_batch_that_is_not_full_waits_longer() -> None:
    for shorts, first in ((1, ()), (CHUNK // 2 // 50 + 1, (SHORT,))):
        me, now = pacer(), 1.0
        spend(me.gap, now - 2 * GAP)
        longs = [long(6000, now)] * (2 * MANY)
        plan = me.plan(now, [short(str(i)) for i in range(shorts)], longs, paused=Paused(9.0, 1, weight=1e-3))
        assert plan.order[:1] == first
