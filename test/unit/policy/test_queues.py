from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest
from cores import Request
from hypothesis import given
from hypothesis import strategies as st
from laps_core.length import LONG, SHORT, ClassName, classify, new_tokens, unit_of, usable_threshold
from laps_core.policy.queues import DualQueue, changes, split, without

T = TypeVar("T")


@given(st.lists(st.integers(1, 1000)))
def test_views_partition_waiting_list_in_order(waiting: list[int]) -> None:
    views = split(waiting, lambda n: classify(n, 256))
    assert views.short == [n for n in waiting if n <= 256]
    assert views.long == [n for n in waiting if n > 256]
    assert views.of(SHORT) is views.short
    assert views.of(LONG) is views.long


@given(st.data())
def test_kept_views_equal_fresh_split(data: st.DataObject) -> None:
    dual: DualQueue[Request] = DualQueue()
    waiting: list[Request] = []
    classed: list[Request] = []

    def class_of(request: Request) -> ClassName:
        classed.append(request)
        return classify(request.seqlen, 256)

    for _ in range(data.draw(st.integers(1, 6))):
        waiting = waiting + [Request("", n) for n in data.draw(st.lists(st.integers(1, 512), max_size=6))]
        what = data.draw(st.sampled_from(["batch", "abort", "grow", "nothing"]))
        views = dual.views(waiting, class_of)
        if what == "batch":
            cls = data.draw(st.sampled_from([SHORT, LONG]))
            shown = list(views.of(cls))
            gone = {id(r) for r in shown if data.draw(st.booleans())}
            waiting = without(waiting, gone)
            dual.remove_batched(cls, gone, waiting)
        elif what == "abort" and waiting:
            waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        elif what == "grow" and waiting:
            waiting[0].seqlen = 400
            dual.forget()
        classed.clear()
        expected = split(waiting, lambda r: classify(r.seqlen, 256))
        views = dual.views(waiting, class_of)
        assert (views.short, views.long) == (expected.short, expected.long)
        if what in ("batch", "nothing"):
            assert not classed, "what was seen is not classed again"


def test_request_that_joined_while_a_batch_was_built_is_in_next_views() -> None:
    dual: DualQueue[Request] = DualQueue()
    first, second, retracted = Request("1", 5), Request("2", 5), Request("3", 5)
    dual.views([first, second], lambda _: SHORT)
    dual.remove_batched(SHORT, {id(first)}, [second, retracted])
    assert dual.views([second, retracted], lambda _: SHORT).short == [second, retracted]


@given(st.lists(st.booleans()), st.integers(0, 3), st.booleans())
def test_changes_finds_taken_and_added_requests(taken: list[bool], added: int, mixed: bool) -> None:
    before = [Request(str(i)) for i in range(len(taken))]
    new = [Request("new") for _ in range(added)]
    after = [r for r, t in zip(before, taken, strict=True) if not t] + new
    if mixed:
        after.reverse()
        new.reverse()
    gone = {id(r) for r, t in zip(before, taken, strict=True) if t}
    assert changes(before, after) == (gone, new)
    assert without(before, gone) == [r for r in before if id(r) not in gone]


class CountingSet(set[int]):
    """Set that counts its lookups."""

    looks = 0

    def __contains__(self, key: object) -> bool:
        self.looks += 1
        return super().__contains__(key)


class CountingList(list[T]):
    """List that counts its iterated items."""

    items = 0

    def __iter__(self) -> Iterator[T]:
        for item in super().__iter__():
            self.items += 1
            yield item


def test_removal_cost_ends_at_last_removed_request() -> None:
    before = CountingList(Request(str(i)) for i in range(100))
    for taken in ((0, 1, 2), (1, 3)):
        gone = CountingSet(id(before[i]) for i in taken)
        after = without(before, gone)
        assert after == [r for i, r in enumerate(list.__iter__(before)) if i not in taken]
        assert gone.looks == taken[-1] + 1
        before.items = 0
        assert changes(before, after) == (gone, [])
        assert before.items <= taken[-1] + 2


def test_remove_batched_skips_view_of_other_class() -> None:
    dual: DualQueue[Request] = DualQueue()
    waiting = [Request("", n) for n in (9, 900, 9, 900, 900)]
    views = dual.views(waiting, lambda r: classify(r.seqlen, 256))
    gone = CountingSet(map(id, views.short))
    dual.remove_batched(SHORT, gone, without(waiting, set(gone)))
    assert gone.looks == 2


def test_request_at_threshold_is_short() -> None:
    assert classify(256, 256) is SHORT
    assert classify(257, 256) is LONG


def test_cached_tokens_count_only_with_prompt_basis() -> None:
    assert new_tokens(30_000, 29_950, "uncached") == 50
    assert new_tokens(30_000, 29_950, "prompt") == 30_000
    assert new_tokens(100, 100, "uncached") == 1


@pytest.mark.parametrize(
    ("threshold", "chunk", "page", "usable"),
    [(256, 1024, 1, 256), (2048, 1000, 64, 960), (300, None, 1, 300), (9, 4, 8, 1)],
)
def test_usable_threshold_fits_one_chunk(threshold: int, chunk: int | None, page: int, usable: int) -> None:
    assert usable_threshold(threshold, chunk, page) == usable


def test_mixed_batch_is_removed_from_both_views() -> None:
    queue: DualQueue[str] = DualQueue()
    waiting = ["s1", "L1", "s2", "L2"]
    queue.views(waiting, lambda r: SHORT if r[0] == "s" else LONG)
    left = without(waiting, {id(waiting[0]), id(waiting[1])})
    queue.remove_batched(LONG, {id(waiting[0]), id(waiting[1])}, left)
    views = queue.views(left, lambda r: SHORT if r[0] == "s" else LONG)
    assert (views.short, views.long) == (["s2"], ["L2"])


def test_chunk_unit_is_multiple_of_page_and_alignment() -> None:
    assert unit_of(16, None) == 16
    assert unit_of(16, 24) == 48
