"""Dual queue: two views of the single list of waiting requests (LAPS, s3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from laps_core.length import LONG, SHORT, ClassName

T = TypeVar("T")


@dataclass(slots=True)
class Views(Generic[T]):
    """Waiting requests by class. Each view keeps the order of the source list."""

    short: list[T] = field(default_factory=list)
    long: list[T] = field(default_factory=list)

    def of(self, cls: ClassName) -> list[T]:
        return self.short if cls == SHORT else self.long


def split(waiting: Iterable[T], class_of: Callable[[T], ClassName]) -> Views[T]:
    """Partition `waiting` by class; every request is in exactly one view."""
    views: Views[T] = Views()
    short, long = views.short.append, views.long.append
    for request in waiting:
        (short if class_of(request) == SHORT else long)(request)
    return views


class DualQueue(Generic[T]):
    """Views of one list of waiting requests, kept from round to round: only new requests are classified.

    SGLang owns the list and may change it at any time. If it no longer starts with the requests seen last, all requests
    are classified again. Otherwise a round costs the new requests plus a comparison of two lists at C speed.
    """

    def __init__(self) -> None:
        self._seen: list[T] = []
        self._views: Views[T] = Views()

    def views(self, waiting: list[T], class_of: Callable[[T], ClassName]) -> Views[T]:
        """Return the same views as ``split``. The caller must not change them."""
        if waiting[: len(self._seen)] != self._seen:
            self.forget()
        came = split(waiting[len(self._seen) :], class_of)
        self._views.short += came.short
        self._views.long += came.long
        self._seen = list(waiting)
        return self._views

    def forget(self) -> None:
        """Drop the kept views, for example because the class of a request has changed."""
        self._seen, self._views = [], Views()

    def remove_batched(self, cls: ClassName, gone: set[int], left: Sequence[T]) -> None:
        """Remove the batched requests with ids `gone`, of `cls` or of both classes. `left`: the list without them. Its
        end may be new to ``views``: retracted streams, or requests whose grammar has become ready."""
        if not self._seen:
            return
        view, other = self._views.of(cls), self._views.of(LONG if cls == SHORT else SHORT)
        before = len(view)
        view[:] = without(view, gone)
        if before - len(view) < len(gone):
            other[:] = without(other, gone)
        self._seen = list(left[: len(self._seen) - len(gone)])


def without(items: list[T], gone: set[int]) -> list[T]:
    """Return `items` without the ids in `gone`: a step for each item up to the last removed item, then one copy."""
    kept: list[T] = []
    left = len(gone)
    for i, item in enumerate(items):
        if not left:
            kept += items[i:]
            break
        if id(item) in gone:
            left -= 1
        else:
            kept.append(item)
    return kept


def changes(before: list[T], after: list[T]) -> tuple[set[int], list[T]]:
    """Return (ids of the items only in `before`, items only in `after`); `after` may be in another order.

    The cost is that of ``without`` if `after` is `before` less some of its first requests.
    """
    missing, at = len(before) - len(after), 0
    gone: set[int] = set()
    for i, item in enumerate(before):
        if len(gone) == missing:
            if before[i:] == after[at:]:
                return gone, []
            break
        if at < len(after) and after[at] is item:
            at += 1
        else:
            gone.add(id(item))
    known, kept = set(map(id, before)), set(map(id, after))
    return known - kept, [item for item in after if id(item) not in known]
