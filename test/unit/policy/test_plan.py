"""A plan is sent to the other ranks as whole numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from laps_core.length import LONG, SHORT
from laps_core.policy.types import LOOKAHEAD, PLAN_NUMBERS, Account, LongBatch, Plan

views = st.lists(st.integers(0, LOOKAHEAD - 1), unique=True, max_size=LOOKAHEAD).map(tuple)
tokens = st.integers(0, 1 << 40)


def make_plan(fields: dict[str, Any]) -> Plan:
    return Plan(**fields)


plans = st.fixed_dictionaries(
    {
        "order": st.sampled_from([(), (SHORT,), (LONG,), (SHORT, LONG), (LONG, SHORT)]),
        "picked": views,
        "long": st.builds(LongBatch, views, tokens, st.integers(0, 1000), st.integers(1, 64)),
        "threshold": tokens,
        **{flag: st.booleans() for flag in ("mixed", "split")},
        "held": st.sampled_from(["", "window", "memory"]),
        "decode": st.sampled_from(["", "first", "carried"]),
    }
).map(make_plan)


@given(plans)
def test_plan_round_trips(plan: Plan) -> None:
    numbers = plan.numbers()
    assert len(numbers) == PLAN_NUMBERS
    assert all(type(n) is int and abs(n) < 1 << 63 for n in numbers)
    assert Plan.of(numbers) == plan


def test_largest_plan_round_trips() -> None:
    every = tuple(range(LOOKAHEAD))
    plan = Plan((SHORT, LONG), every, LongBatch(every, 1 << 40, 99, 7), 1 << 40, True, True, "memory", "carried")
    assert len(plan.numbers()) == PLAN_NUMBERS
    assert Plan.of(plan.numbers()) == plan


def test_encoded_plan_omits_account() -> None:
    plan = Plan((SHORT,), (1,), account=Account("preempt", 0.1, 1, True, True, contended=True, until_s=5.0))
    assert Plan.of(plan.numbers()) == Plan((SHORT,), (1,))
