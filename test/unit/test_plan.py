"""A plan travels to the other ranks as whole numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from laps_core.length import LONG, SHORT
from laps_core.policy.types import LOOKAHEAD, PLAN_NUMBERS, Plan

views = st.lists(st.integers(0, LOOKAHEAD - 1), unique=True, max_size=LOOKAHEAD).map(tuple)
tokens = st.integers(0, 1 << 40)


def made(fields: dict[str, Any]) -> Plan:
    return Plan(**fields)


plans = st.fixed_dictionaries(
    {
        "order": st.sampled_from([(), (SHORT,), (LONG,), (SHORT, LONG), (LONG, SHORT)]),
        "picked": views,
        "longs": views,
        "tokens": tokens,
        "layers": st.integers(0, 1000),
        "threshold": tokens,
        **{flag: st.booleans() for flag in ("waiting", "mixed", "keeps_memory", "decode", "split", "carries")},
    }
).map(made)


@given(plans)
def test_a_plan_arrives_as_it_was_made(plan: Plan) -> None:
    numbers = plan.numbers()
    assert len(numbers) == PLAN_NUMBERS
    assert all(type(n) is int and abs(n) < 1 << 63 for n in numbers)
    assert Plan.of(numbers) == plan


def test_the_fullest_plan_fits() -> None:
    every = tuple(range(LOOKAHEAD))
    plan = Plan((SHORT, LONG), every, every, 1 << 40, 99, 1 << 40, True, True, True)
    assert len(plan.numbers()) == PLAN_NUMBERS
    assert Plan.of(plan.numbers()) == plan


def test_the_leaders_books_do_not_travel() -> None:
    plan = Plan((SHORT,), (1,), until_s=5.0, reason="preempt", waited_s=0.1, late=1, passed_over=True, oldest=True,
                contended=True)  # fmt: skip
    assert Plan.of(plan.numbers()) == Plan((SHORT,), (1,))
