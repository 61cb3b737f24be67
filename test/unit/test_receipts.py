"""Causes of the TTFT, which add up for any batches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.length import CLASSES, LONG, SHORT
from laps_core.policy.types import LongBatch, Plan
from laps_core.receipts.account import Moments, Wait, account
from laps_core.receipts.holds import held_long, held_short
from laps_core.receipts.ledger import Ledger, Run

END = 10_000


def run(cls: str | None, begin: int, *rids: str, depth: int = 0) -> Run:
    return Run(cls=cls, rids=rids, tokens=(10,) * len(rids), depth=depth, begin_us=begin)  # type: ignore[arg-type]


def moments(**more: object) -> Moments:
    return Moments(**{"rid": "me", "cls": SHORT, "arrived_us": 0, "end_us": 100, **more})  # type: ignore[arg-type]


def filled(rng: random.Random) -> tuple[Ledger, list[Run]]:
    """Return a ledger of random batches, some paused for others, and all batches in order of their starts."""
    ledger, runs = Ledger(), list[Run]()

    def stretch(begin: int, end: int, depth: int) -> None:
        at = begin
        while at < end:
            at += rng.choice((0, 0, rng.randint(1, 300)))
            until = min(end, at + rng.randint(1, 900))
            if until <= at:
                return
            made = run(rng.choice((*CLASSES, None)), at, f"r{rng.randrange(9)}", depth=depth)
            runs.append(made)
            ledger.record_start(made)
            if rng.random() < 0.1:
                cls, cause = rng.choice(CLASSES), rng.choice(("gap", "window", "memory", None))
                ledger.record_hold(at + rng.randint(0, 50), cls, cause, waits=True)  # type: ignore[arg-type]
            if depth < 3 and rng.random() < 0.5:
                stretch(at + rng.randint(0, 200), until, depth + 1)
            if until < END or rng.random() < 0.5:
                # The clocks of host and device differ by some microseconds.
                ledger.record_end(made, at - rng.randint(0, 3), until + rng.randint(0, 3))
            at = until

    stretch(0, END, 0)
    return ledger, runs


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_causes_add_up_and_none_is_negative(seed: int) -> None:
    rng = random.Random(seed)
    ledger, runs = filled(rng)
    end = rng.randint(1, END)
    own = sorted(rng.sample(runs, min(len(runs), rng.randint(0, 3))), key=lambda r: r.begin_us)
    marks = [rng.choice((None, rng.randint(-10, END + 10))) for _ in range(6)]
    begin, arrived = rng.randint(0, END), rng.randint(0, end)
    found = account(
        Moments(
            rid="me",
            cls=rng.choice(CLASSES),
            arrived_us=arrived,
            end_us=end,
            runs=own,
            blocked=[Wait(begin, begin + rng.randint(0, 500), "prefetch")] if rng.random() < 0.3 else (),
            **dict(
                zip(
                    ("sent_us", "received_us", "asked_us", "waits_us", "ready_us", "transferred_us"), marks, strict=True
                )
            ),
        ),
        ledger,
    )
    assert sum(found.causes_us.values()) == end - arrived
    assert all(us > 0 for us in found.causes_us.values())
    assert len(found.behind) <= 8
    assert all(b.ms > 0.0 for b in found.behind)


@given(st.integers(0, 2**32), st.integers(0, END), st.integers(0, END))
@settings(max_examples=300, deadline=None)
def test_pieces_cover_a_stretch_once(seed: int, a: int, b: int) -> None:
    ledger, _ = filled(random.Random(seed))
    begin, end = min(a, b), max(a, b)
    at = begin
    for piece in ledger.pieces(begin, end):
        assert piece[0] == at < piece[1]
        at = piece[1]
    assert at == end


def test_what_preempts_has_the_time_and_not_what_it_preempts() -> None:
    ledger, long, short = Ledger(), run(LONG, 10, "L"), run(SHORT, 40, "S", depth=1)
    ledger.record_start(long)
    ledger.record_start(short)
    # The long batch is not done, so it gets all time that the other batch does not have.
    assert account(moments(runs=[short], end_us=45, waits_us=5), ledger).causes_us == {
        "tokenizing": 5,
        "scheduling": 5,
        "behind_long": 30,
        "computing": 5,
    }
    ledger.record_end(short, 40, 55)
    ledger.record_end(long, 10, 90)
    assert [(begin, end, run and run.rids) for begin, end, run in ledger.pieces(0, 100)] == [
        (0, 10, None),
        (10, 40, ("L",)),
        (40, 55, ("S",)),
        (55, 90, ("L",)),
        (90, 100, None),
    ]
    assert long.own_us == 65
    lone = account(moments(rid="L", cls=LONG, runs=[long], waits_us=0, transferred_us=95), ledger)
    assert lone.causes_us == {"scheduling": 10, "computing": 65, "preempted": 15, "transfer": 5, "answering": 5}
    assert [(b.rid, b.tokens, b.ms) for b in lone.behind] == [("S", 10, 0.015)]


def test_a_request_waits_for_what_it_is_held_back_by() -> None:
    ledger, long, streams = Ledger(), run(LONG, 10, "L"), run(None, 60)
    ledger.record_hold(0, SHORT, "window", waits=True)
    ledger.record_hold(20, SHORT, "gap", waits=True)
    ledger.record_hold(40, SHORT, None, waits=True)
    ledger.record_end(long, 10, 60)
    ledger.record_end(streams, 60, 70)
    own = run(SHORT, 80, "me")
    ledger.record_end(own, 80, 90)
    found = account(moments(runs=[own], waits_us=0), ledger).causes_us
    assert found == {
        "window": 10,
        "behind_long": 30,
        "gap": 20,
        "behind_streams": 10,
        "scheduling": 10,
        "computing": 10,
        "answering": 10,
    }
    # A prompt with a running prefetch could not have run.
    found = account(moments(runs=[own], waits_us=0, blocked=[Wait(5, 65, "prefetch")]), ledger).causes_us
    assert found["prefetch"] == 60


def test_one_that_has_no_batch_has_waited_only() -> None:
    ledger = Ledger()
    assert account(moments(sent_us=10, received_us=10, asked_us=12), ledger).causes_us == {
        "tokenizing": 12,
        "decode_room": 88,
    }
    assert account(moments(), ledger).causes_us == {"other": 100}


def test_tokens_of_a_batch_that_is_paused_count_once() -> None:
    ledger, long = Ledger(), run(LONG, 0, "L")
    ledger.record_start(long)
    for begin in (10, 30, 50):
        ledger.record_end(run(SHORT, begin, "S", depth=1), begin, begin + 5)
    ledger.record_end(long, 0, 90)
    found = {b.rid: (b.tokens, b.ms) for b in account(moments(waits_us=0), ledger).behind}
    assert found == {"L": (10, 0.075), "S": (30, 0.015)}


def test_those_behind_are_the_longest_and_the_rest_is_counted() -> None:
    ledger = Ledger()
    for i in range(20):
        ledger.record_end(run(LONG, 10 * i, f"L{i}"), 10 * i, 10 * i + 9 - i % 3)
    found = account(moments(waits_us=0, end_us=200), ledger)
    assert (len(found.behind), found.left_out) == (8, 12)
    assert found.behind[0].ms == max(b.ms for b in found.behind) == 0.009


def test_memory_is_bounded() -> None:
    ledger = Ledger(100)
    for i in range(1000):
        ledger.record_end(run(LONG, 10 * i, "L"), 10 * i, 10 * i + 5)
        ledger.record_hold(10 * i, SHORT, "gap" if i % 2 else None, waits=True)
    assert len(ledger) <= 125
    assert len(ledger.holds_between(SHORT, 0, 10_000)) <= 125
    assert ledger.pieces(9990, 10_000)[0][2] is not None


@pytest.mark.parametrize(
    ("plan", "long", "built", "cause"),
    [
        (Plan((SHORT,), (0,)), True, True, None),
        (Plan((SHORT,), (0,)), True, False, "memory"),
        (Plan((LONG,), (0,), LongBatch((0,)), mixed=True), True, True, None),
        (Plan((), held="window"), False, False, "window"),
        (Plan((), held="memory"), True, False, "memory"),
        (Plan((LONG, SHORT), (0,), LongBatch((0,))), True, True, "gap"),
        (Plan((), decode="first"), True, False, None),
    ],
)
def test_why_short_requests_wait(plan: Plan, long: bool, built: bool, cause: str | None) -> None:
    assert held_short(plan, long=long, joint=False, built=built) == cause


def test_why_others_wait() -> None:
    assert held_short(Plan(()), long=True, joint=True, built=False) == "ranks"
    assert held_long(Plan(()), lacking=False, joint=True) == "ranks"
    assert held_long(Plan((LONG,)), lacking=True, joint=False) == "memory"
    assert held_long(Plan((SHORT, LONG)), lacking=False, joint=False) is None
