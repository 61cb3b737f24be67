"""The ledger of the long class, over any history: neither class can pile up a claim."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang_laps.policy.fairness import Launch, LongShare
from sglang_laps.policy.length import LONG, SHORT


@dataclass(frozen=True)
class Round:
    """One decision. Both classes wait unless `alone` names the one that does."""

    short_s: float
    long_s: float
    alone: str | None = None
    blocked: bool = False
    """The long batch cannot be placed."""
    first: str | None = None
    """The class that goes whether owed or not: a priority, a window that holds the shorts, time to spare."""


times = st.one_of(st.floats(1e-3, 0.2), st.floats(1e-3, 2.0))
rounds = st.builds(
    Round,
    times,
    times,
    st.sampled_from([None] * 8 + ["short", "long"]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([None] * 6 + ["short", "long"]),
)
histories = st.lists(st.tuples(rounds, st.integers(1, 12)), max_size=40).map(
    lambda blocks: [one for one, times in blocks for _ in range(times)]
)


@given(histories, st.sampled_from([0.05, 0.25, 0.5, 0.9]), st.sampled_from([1, 2]))
@example([Round(0.5, 0.5, first="long")] * 100 + [Round(0.01, 0.5)] * 400, 0.25, 1)
@example([Round(0.05, 0.5, blocked=True)] * 1200 + [Round(0.05, 0.5)] * 80, 0.25, 2)
@example([Round(0.1, 0.01), Round(0.1, 2.0)] * 20, 0.25, 2)
@settings(max_examples=400, deadline=None)
def test_neither_class_starves_beyond_its_bound(history: list[Round], share: float, depth: int) -> None:
    ledger = LongShare(share)
    flying: deque[tuple[Launch, float, bool]] = deque()
    longest = {SHORT: 0.0, LONG: 0.0}
    last_long = starved = run = 0.0

    def settle() -> None:
        nonlocal last_long, starved
        launch, seconds, counts = flying.popleft()
        ledger.settle(launch, seconds)
        if launch.cls is LONG:
            last_long, starved = seconds, 0.0
        elif counts:
            starved += seconds

    for now in history:
        contended = now.alone is None
        owed = ledger.owed()
        if now.alone == "short":
            ledger.long_done()
            starved = 0.0
        cls = LONG if owed and not now.blocked else SHORT
        if now.first == "long" and not now.blocked:
            cls = LONG
        elif now.first == "short":
            cls = SHORT
        if not contended:
            cls = LONG if now.alone == "long" else SHORT
        seconds = now.long_s if cls is LONG else now.short_s
        if contended and not owed and not any(launch.cls is LONG for launch, *_ in flying):
            # What is in flight has not been measured yet: the bound allows a short batch for each.
            assert starved <= 2 * (1 - share) / share * last_long + 1e-9
        if contended and cls is LONG and owed and now.first is None:
            run += seconds
        else:
            run = 0.0
        longest[cls] = max(longest[cls], seconds)
        assert run <= depth * (2 * longest[LONG] + share / (1 - share) * longest[SHORT]) + 1e-9
        flying.append((ledger.launch(cls, contended=contended), seconds, contended and not owed))
        while len(flying) >= depth:
            settle()


def test_chunks_that_were_not_owed_are_not_held_against_the_long_class() -> None:
    ledger = LongShare(0.25)
    for _ in range(100):  # nothing else could run
        ledger.settle(ledger.launch(LONG, contended=True), 0.5)
    short_s = 0.0
    while not ledger.owed():
        ledger.settle(ledger.launch(SHORT, contended=True), 0.05)
        short_s += 0.05
    assert short_s == pytest.approx(1.5, abs=0.051)


def test_a_head_that_cannot_be_placed_earns_one_batch_and_no_run_of_them() -> None:
    ledger = LongShare(0.25)
    ledger.settle(ledger.launch(LONG, contended=False), 0.5)
    for _ in range(1200):  # a minute without memory for the long class
        ledger.settle(ledger.launch(SHORT, contended=True), 0.05)
    chunks = 0
    while ledger.owed():
        ledger.settle(ledger.launch(LONG, contended=True), 0.5)
        chunks += 1
    assert chunks == 1


def test_a_long_batch_that_ran_alone_is_a_turn_too() -> None:
    ledger = LongShare(0.25)
    ledger.settle(ledger.launch(LONG, contended=False), 0.1)
    ledger.settle(ledger.launch(SHORT, contended=True), 0.35)
    assert ledger.owed()
    ledger.settle(ledger.launch(LONG, contended=False), 0.1)
    # A short request that came meanwhile has waited for this chunk and does not wait for another.
    assert not ledger.owed()
    assert ledger.credit_s == pytest.approx(0.25 * 0.35 - 0.75 * 0.1)
