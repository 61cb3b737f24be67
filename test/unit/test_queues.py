from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_laps.policy.fairness import LongShare
from sglang_laps.policy.length import LONG, SHORT, classify, new_tokens, usable_threshold
from sglang_laps.policy.queues import split, turn


@given(st.lists(st.integers(1, 1000)))
def test_the_views_partition_the_list_in_order(waiting: list[int]) -> None:
    views = split(waiting, lambda n: classify(n, 256))
    assert views.short == [n for n in waiting if n <= 256]
    assert views.long == [n for n in waiting if n > 256]
    assert views.of(SHORT) is views.short
    assert views.of(LONG) is views.long


def test_the_threshold_itself_is_short() -> None:
    assert classify(256, 256) is SHORT
    assert classify(257, 256) is LONG


def test_cached_tokens_do_not_count_unless_asked() -> None:
    assert new_tokens(30_000, 29_950, "uncached") == 50
    assert new_tokens(30_000, 29_950, "prompt") == 30_000
    assert new_tokens(100, 100, "uncached") == 1


@pytest.mark.parametrize(
    ("threshold", "chunk", "page", "usable"),
    [(256, 1024, 1, 256), (2048, 1000, 64, 960), (300, None, 1, 300), (9, 4, 8, 1)],
)
def test_a_short_request_fits_one_chunk(threshold: int, chunk: int | None, page: int, usable: int) -> None:
    assert usable_threshold(threshold, chunk, page) == usable


def test_turns() -> None:
    assert turn(short=False, long=False, long_owed=True) == ()
    assert turn(short=True, long=False, long_owed=True) == (SHORT,)
    assert turn(short=False, long=True, long_owed=False) == (LONG,)
    assert turn(short=True, long=True, long_owed=False) == (SHORT, LONG)
    assert turn(short=True, long=True, long_owed=True) == (LONG, SHORT)
    assert turn(short=True, long=True, long_owed=True, urgent=SHORT) == (SHORT, LONG)


def test_a_batch_in_flight_is_not_paid_for_twice() -> None:
    ledger = LongShare(0.25)
    ledger.settle(ledger.launch(LONG, contended=False), 0.1)
    assert not ledger.owed()
    while not ledger.owed():
        ledger.settle(ledger.launch(SHORT, contended=True), 0.05)
    first = ledger.launch(LONG, contended=True)
    assert not ledger.owed()
    ledger.settle(first, 0.1)
    assert not ledger.owed()


def test_without_a_share_the_long_class_is_never_owed() -> None:
    ledger = LongShare(0.0)
    for _ in range(100):
        ledger.settle(ledger.launch(SHORT, contended=True), 1.0)
    assert not ledger.owed()


def test_credit_does_not_outlive_the_long_work() -> None:
    ledger = LongShare(0.5)
    ledger.settle(ledger.launch(SHORT, contended=True), 1.0)
    assert ledger.credit_s == 0.5
    ledger.long_done()
    assert ledger.credit_s == 0.0
