"""Choice for short requests between their own batch and waiting for a step to share."""

from __future__ import annotations

import pytest
from laps_core.length import LONG, SHORT
from laps_core.policy.exchange import AHEAD
from laps_core.policy.fairness import MANY
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import Paused, Plan, Waiting
from pacers import (
    CHUNK,
    FIXED_S,
    GAP,
    TOKEN_S,
    end_batch,
    launch_batch,
    long_prompt,
    make_pacer,
    short_prompt,
    use_up_preemptions,
)

LONE = FIXED_S + 50 * TOKEN_S
"""Time of a short request alone (seconds)."""


# -- in the middle of a long batch


def plan_one_short(
    pacer: Pacer, left_s: float, others: int, *, weight: float = 0.0, now: float = 1.0, tokens: int = 300
) -> Plan:
    """Return the plan for one short request, ``others`` waiting long prompts, and a paused batch."""
    paused = Paused(left_s, 1, weight=weight)
    return pacer.plan(now, [short_prompt("a", arrival=now)], [long_prompt(tokens, now)] * others, paused=paused)


def test_short_request_preempts_if_wait_outweighs_cost_to_others() -> None:
    lone = FIXED_S + 300 * TOKEN_S
    for others in (1, 10, 40):
        enough = others / lone * FIXED_S * AHEAD * LONE
        assert plan_one_short(make_pacer(), 1.001 * enough, others).order[:1] == (SHORT,)
        assert plan_one_short(make_pacer(), 0.999 * enough, others).order[:1] != (SHORT,)


def test_longer_waiting_prompts_make_preemption_cheaper() -> None:
    assert plan_one_short(make_pacer(), 0.15, 40, tokens=300).order[:1] != (SHORT,)
    assert plan_one_short(make_pacer(), 0.15, 40, tokens=6000).order[:1] == (SHORT,)


def test_preemption_cost_counts_delay_of_paused_batch() -> None:
    enough = 5.0 * LONE * LONE
    assert plan_one_short(make_pacer(), 1.001 * enough, 0, weight=5.0).order[:1] == (SHORT,)
    assert plan_one_short(make_pacer(), 0.999 * enough, 0, weight=5.0).order[:1] != (SHORT,)


def test_short_request_preempts_if_waiting_misses_deadline() -> None:
    pacer, now = make_pacer(), 1.0
    use_up_preemptions(pacer.gap, now - 2 * MANY * GAP)
    for slack, first in ((0.5, LONG), (0.03, SHORT)):
        one = [short_prompt("a", arrival=now, deadline=now + LONE + slack)]
        plan = pacer.plan(now, one, [long_prompt(300, now)] * 400, paused=Paused(0.1, 1, weight=1.0))
        assert (plan.order[:1] == (SHORT,)) == (first is SHORT)


def test_short_request_preempts_while_fixed_time_is_unknown() -> None:
    assert plan_one_short(make_pacer(known=False), 0.001, 400).order[:1] == (SHORT,)


def test_higher_priority_preempts_at_any_cost() -> None:
    paused = Paused(0.001, 1, weight=100.0)
    assert make_pacer().plan(1.0, [short_prompt("a")], [long_prompt(300)] * 400, urgent=SHORT, paused=paused).order[
        :1
    ] == (SHORT,)


# -- at the start of a long batch


def test_short_request_shares_step_of_long_prompt_if_cheap() -> None:
    """With one long prompt: sharing delays the short request by the prompt's work. It saves the prompt FIXED_S, which
    counts AHEAD times, and saves later arrivals FIXED_S, which counts AHEAD - 1 times."""
    near = next(
        n
        for n in range(CHUNK)
        if (n * TOKEN_S - (AHEAD - 1.0) * FIXED_S) * (FIXED_S + n * TOKEN_S) > FIXED_S * AHEAD * LONE
    )
    plan = make_pacer().plan(1.0, [short_prompt("a")], [long_prompt(near - 1)])
    assert (plan.mixed, plan.order[0], plan.picked, plan.long.picked) == (True, LONG, (0,), (0,))
    assert plan.long.tokens == near - 1 + 50
    assert make_pacer().plan(1.0, [short_prompt("a")], [long_prompt(near)]).order == (SHORT, LONG)


def many_long_prompts(n: int = 60) -> list[Waiting]:
    """Return long prompts that are nearly short."""
    return [long_prompt(260, 1.0)] * n


def test_more_waiting_requests_allow_longer_shared_steps() -> None:
    def plan(behind: int) -> Plan:
        return make_pacer(chunk=4096).plan(
            1.0, [short_prompt("a")], [long_prompt(800, 0.5), *[long_prompt(4000, 1.0)] * behind]
        )

    assert not plan(2).mixed
    assert plan(60).mixed
    assert plan(60).long.layers > 0, "it makes way for those that come later"


def test_step_is_shared_only_if_both_fit_token_budget() -> None:
    for chunk, mixed in ((4 * 56 + 600, True), (4 * 56 + 592, False)):
        plan = make_pacer(chunk=chunk, unit=8).plan(
            1.0, [short_prompt(i, 50) for i in range(4)], [long_prompt(600)] * 90
        )
        assert plan.mixed == mixed, chunk
        assert plan.long.picked == (0,)
        assert plan.long.tokens == (chunk if mixed else 600)


def test_sharing_is_refused_if_only_separate_batch_meets_deadline() -> None:
    def mixed(deadline_s: float) -> bool:
        return (
            make_pacer(chunk=4096).plan(1.0, [short_prompt("a", deadline=1.0 + deadline_s)], many_long_prompts()).mixed
        )

    assert mixed(10.0)
    assert not mixed(LONE + 0.01)
    assert mixed(0.5 * LONE), "it cannot be made at all"


def test_closed_gap_reduces_cost_of_sharing() -> None:
    """A request could preempt no sooner than the gap's end, so sharing delays it by the rest of the long batch."""
    longs = [long_prompt(800)]
    assert not make_pacer().plan(1.0, [short_prompt("a")], longs).mixed
    pacer = make_pacer()
    use_up_preemptions(pacer.gap, 1.0)
    assert pacer.plan(1.0, [short_prompt("a")], longs).mixed
    assert not pacer.plan(1.0, [short_prompt("a")], [long_prompt(1200)]).mixed, "half a gap too long"


def test_costly_step_is_not_shared_during_short_batch() -> None:
    """The overlap loop builds a batch before the previous one has ended, when the end of the gap is unknown."""
    shorts, longs = [short_prompt("a")], [long_prompt(CHUNK, 1.0)]
    for now in (1.0, 2.0):
        pacer = make_pacer(chunk=2 * CHUNK)
        before = pacer.plan(0.99, shorts, longs)
        use_up_preemptions(pacer.gap, 0.99 - GAP)
        on_the_device = launch_batch(pacer, 0.99, before)
        plan = pacer.plan(now, shorts, longs)
        assert (plan.order, plan.mixed) == ((LONG, SHORT), False)
        assert pacer.plan(now, shorts, [long_prompt(300, 1.0)]).mixed, "this one costs it less than it brings"
        end_batch(pacer, on_the_device, 0.99, now)


def test_urgent_short_request_shares_no_step() -> None:
    assert make_pacer(chunk=4096).plan(1.0, [short_prompt("a")], many_long_prompts()).mixed
    assert not make_pacer(chunk=4096).plan(1.0, [short_prompt("a")], many_long_prompts(), urgent=SHORT).mixed


def test_short_request_of_lower_priority_shares_any_step_that_has_room() -> None:
    # Otherwise it runs after all long work of higher priority.
    for tokens, mixed in ((CHUNK - 50, True), (CHUNK - 49, False)):
        plan = make_pacer().plan(1.0, [short_prompt("a")], [long_prompt(tokens)], urgent=LONG)
        assert (plan.order[0], plan.mixed) == (LONG, mixed)
    assert not make_pacer().plan(1.0, [short_prompt("a")], [long_prompt(CHUNK - 50)]).mixed, "its own step is sooner"


def test_shared_step_counts_no_preemption_and_keeps_gap_open() -> None:
    pacer = make_pacer(chunk=4096)
    plan = pacer.plan(1.0, [short_prompt("a")], many_long_prompts())
    assert plan.mixed
    sent = launch_batch(pacer, 1.0, plan)
    assert not sent.preempts
    end_batch(pacer, sent, 1.0, 1.1)
    assert pacer.preemptions == 0
    assert pacer.status(2.0)["preemption"]["steps_shared"] == 1
    assert pacer.gap.opens_at() < 1.0


@pytest.mark.parametrize("since", [0.0, 0.9])
def test_shared_step_records_oldest_prompt_for_guard(since: float) -> None:
    longs = [long_prompt(258, 0.5), long_prompt(259, since), *many_long_prompts()]
    plan = make_pacer(chunk=4096).plan(1.0, [short_prompt("a")], longs)
    assert plan.mixed
    assert plan.account.oldest
    assert min(range(len(longs)), key=lambda i: longs[i].since_s) in plan.long.picked


def test_partial_short_batch_waits_longer_if_many_are_delayed() -> None:
    for shorts, first in ((1, ()), (CHUNK // 2 // 50 + 1, (SHORT,))):
        pacer, now = make_pacer(), 1.0
        use_up_preemptions(pacer.gap, now - 2 * GAP)
        longs = [long_prompt(6000, now)] * (2 * MANY)
        plan = pacer.plan(now, [short_prompt(str(i)) for i in range(shorts)], longs, paused=Paused(9.0, 1, weight=1e-3))
        assert plan.order[:1] == first
