"""The guard: least work first, but no prompt waits forever."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.policy.fairness import Guard


def test_oldest_prompt_is_due_after_batch_of_others() -> None:
    guard = Guard(0.25)
    assert not guard.due()
    guard.record_batch(0.1, oldest=False)
    assert guard.due()
    guard.record_batch(0.1, oldest=True)
    assert not guard.due()


def test_oldest_prompt_is_never_due_without_share() -> None:
    guard = Guard(0.0)
    guard.record_batch(5.0, oldest=False)
    assert not guard.due()


def test_guard_credit_is_limited_to_one_batch() -> None:
    guard = Guard(0.25)
    for _ in range(1000):
        guard.record_batch(0.1, oldest=False)
    turns = 0
    while guard.due():
        guard.record_batch(0.1, oldest=True)
        turns += 1
    assert turns <= 2


def test_guard_debt_is_limited_to_one_batch() -> None:
    guard = Guard(0.25)
    for _ in range(1000):
        guard.record_batch(0.1, oldest=True)
    others = 0
    while not guard.due():
        guard.record_batch(0.1, oldest=False)
        others += 1
    assert others <= 4


def test_guard_reset_clears_credit() -> None:
    guard = Guard(0.25)
    guard.record_batch(1.0, oldest=False)
    guard.reset()
    assert not guard.due()


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 1 << 30), share=st.floats(0.05, 1.0))
def test_oldest_prompt_gets_its_share_of_any_long_time(seed: int, share: float) -> None:
    """The oldest prompt gets at least share L - 2 B of a time L, where B is the longest batch (one before and one after
    that time)."""
    rng, guard, log = random.Random(seed), Guard(share), []
    for _ in range(120):
        took = rng.choice((0.01, 0.05, 0.2)) * rng.uniform(0.5, 1.5)
        oldest = guard.due() or rng.random() < 0.1  # the oldest can also be next by its size
        guard.record_batch(took, oldest=oldest)
        log.append((took, oldest))
    most = max(took for took, _ in log)
    for i in range(0, 120, 7):
        for j in range(i + 1, 121, 5):
            total = sum(took for took, _ in log[i:j])
            assert sum(took for took, oldest in log[i:j] if oldest) >= share * total - 2 * most - 1e-9
