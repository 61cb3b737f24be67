"""Causes of the TTFT, which add up for any batches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.length import CLASSES, LONG, SHORT
from laps_core.policy.types import LongBatch, Plan
from laps_core.receipts.account import Moments, Wait, account
from laps_core.receipts.blocks import DETAIL, SIZE
from laps_core.receipts.holds import held_long, held_short
from laps_core.receipts.ledger import Ledger
from laps_core.receipts.run import Run

END = 10_000


def run(cls: str | None, begin: int, *rids: str, depth: int = 0) -> Run:
    return Run(cls=cls, rids=rids, tokens=(10,) * len(rids), depth=depth, begin_us=begin)  # type: ignore[arg-type]


def moments(**more: object) -> Moments:
    return Moments(**{"rid": "me", "cls": SHORT, "arrived_us": 0, "end_us": 100, **more})  # type: ignore[arg-type]


def fill_ledger(rng: random.Random, block: int = SIZE) -> tuple[Ledger, list[Run]]:
    """Return a ledger of random batches, some paused for others, and all batches in order of their starts."""
    ledger, runs = Ledger(block=block), list[Run]()

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


def random_moments(rng: random.Random, runs: list[Run]) -> Moments:
    """Return the moments of a random request."""
    end = rng.randint(1, END)
    own = sorted(rng.sample(runs, min(len(runs), rng.randint(0, 3))), key=lambda r: r.begin_us)
    marks = [rng.choice((None, rng.randint(-10, END + 10))) for _ in range(6)]
    begin = rng.randint(0, END)
    return Moments(
        rid="me",
        cls=rng.choice(CLASSES),
        arrived_us=rng.randint(0, end),
        end_us=end,
        runs=own,
        blocked=[Wait(begin, begin + rng.randint(0, 500), "prefetch")] if rng.random() < 0.3 else (),
        **dict(
            zip(("sent_us", "received_us", "asked_us", "waits_us", "ready_us", "transferred_us"), marks, strict=True)
        ),
    )


@given(st.integers(0, 2**32), st.sampled_from((1, 2, 5, SIZE)))
@settings(max_examples=300, deadline=None)
def test_causes_add_up_to_ttft_and_are_positive(seed: int, block: int) -> None:
    rng = random.Random(seed)
    ledger, runs = fill_ledger(rng, block)
    m = random_moments(rng, runs)
    found = account(m, ledger)
    assert sum(found.causes_us.values()) == m.end_us - m.arrived_us
    assert all(us > 0 for us in found.causes_us.values())
    assert len(found.behind) <= 8
    assert all(b.ms > 0.0 for b in found.behind)


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_receipt_from_sums_of_blocks_is_that_from_pieces(seed: int, block: int) -> None:
    def made(block: int) -> tuple[object, ...]:
        rng = random.Random(seed)
        ledger, runs = fill_ledger(rng, block)
        found = account(random_moments(rng, runs), ledger)
        # Requests with the same time can be in any order.
        return found.causes_us, [b.ms for b in found.behind], found.left_out

    assert made(block) == made(10**6)


@pytest.mark.parametrize("ran", [True, False])
def test_cost_of_receipt_is_same_after_any_number_of_batches(ran: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(batches: int) -> int:
        ledger, end = Ledger(), 10 * batches
        for at in range(0, end, 10):
            ledger.record_hold(at, SHORT, "gap" if at % 3 else None, waits=True)
            ledger.record_end(run(LONG if at % 20 else SHORT, at, f"r{at}"), at, at + 9)
        own = [run(SHORT, end, "me")] if ran else []
        for made in own:
            ledger.record_end(made, end, end + 9)
        visited, pieces = list[object](), ledger.pieces

        def counted(begin_us: int, end_us: int) -> list[tuple[int, int, Run | None]]:
            visited.extend(pieces(begin_us, end_us))
            return pieces(begin_us, end_us)

        monkeypatch.setattr(ledger, "pieces", counted)
        found = account(moments(runs=own, waits_us=2, arrived_us=1, end_us=end + 10), ledger)
        assert sum(found.causes_us.values()) == end + 9
        assert len(found.behind) == 8
        assert (found.left_out == batches - 8) == (batches <= DETAIL)
        return len(visited)

    assert max(seen(500), seen(DETAIL), seen(20_000)) <= 4 * SIZE


def test_wait_for_forgotten_batches_costs_little() -> None:
    ledger = Ledger(1000)
    for i in range(5000):
        ledger.record_hold(10 * i, SHORT, "gap" if i % 2 else None, waits=True)
        ledger.record_end(run(LONG, 10 * i, "L"), 10 * i, 10 * i + 10)
    assert len(ledger.holds_between(SHORT, 0, 50_000)) <= 1100
    assert sum(account(moments(waits_us=0, end_us=50_000), ledger).causes_us.values()) == 50_000


@given(st.integers(0, 2**32), st.integers(0, END), st.integers(0, END))
@settings(max_examples=300, deadline=None)
def test_ledger_pieces_cover_time_range_once(seed: int, a: int, b: int) -> None:
    ledger, _ = fill_ledger(random.Random(seed))
    begin, end = min(a, b), max(a, b)
    at = begin
    for piece in ledger.pieces(begin, end):
        assert piece[0] == at < piece[1]
        at = piece[1]
    assert at == end


def test_preemption_time_counts_for_preempting_batch() -> None:
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


def test_waiting_time_is_assigned_to_holding_cause() -> None:
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


def test_request_without_batch_has_only_waiting_causes() -> None:
    ledger = Ledger()
    assert account(moments(sent_us=10, received_us=10, asked_us=12), ledger).causes_us == {
        "tokenizing": 12,
        "decode_room": 88,
    }
    assert account(moments(), ledger).causes_us == {"other": 100}


def test_tokens_of_paused_batch_count_once() -> None:
    ledger, long = Ledger(), run(LONG, 0, "L")
    ledger.record_start(long)
    for begin in (10, 30, 50):
        ledger.record_end(run(SHORT, begin, "S", depth=1), begin, begin + 5)
    ledger.record_end(long, 0, 90)
    found = {b.rid: (b.tokens, b.ms) for b in account(moments(waits_us=0), ledger).behind}
    assert found == {"L": (10, 0.075), "S": (30, 0.015)}


def test_receipt_names_longest_requests_and_counts_rest() -> None:
    ledger = Ledger()
    for i in range(20):
        ledger.record_end(run(LONG, 10 * i, f"L{i}"), 10 * i, 10 * i + 9 - i % 3)
    found = account(moments(waits_us=0, end_us=200), ledger)
    assert (len(found.behind), found.left_out) == (8, 12)
    assert found.behind[0].ms == max(b.ms for b in found.behind) == 0.009


def test_requests_that_a_batch_only_counts_are_left_out_not_lost() -> None:
    found = []
    for named in (8, 300):
        ledger = Ledger()
        for i, cls in enumerate((SHORT, SHORT, LONG)):
            one = run(cls, 10 * i, *(f"{cls} {i} {n}" for n in range(named)))
            one.more = 300 - named
            ledger.record_end(one, 10 * i, 10 * i + 9 - i)
        found.append(account(moments(waits_us=0, end_us=200), ledger))
    assert found[0] == found[1]
    assert (len(found[0].behind), found[0].left_out) == (8, 892)


def test_ledger_memory_is_bounded() -> None:
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
def test_hold_cause_of_short_requests_follows_plan(plan: Plan, long: bool, built: bool, cause: str | None) -> None:
    assert held_short(plan, long=long, joint=False, built=built) == cause


def test_hold_cause_of_long_prompts_and_dp_ranks() -> None:
    assert held_short(Plan(()), long=True, joint=True, built=False) == "ranks"
    assert held_long(Plan(()), lacking=False, joint=True) == "ranks"
    assert held_long(Plan((LONG,)), lacking=True, joint=False) == "memory"
    assert held_long(Plan((SHORT, LONG)), lacking=False, joint=False) is None
