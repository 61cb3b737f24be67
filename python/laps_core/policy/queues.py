"""The dual queue: two views over the one list of waiting requests, and whose turn it is (LAPS, s3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from laps_core.length import LONG, SHORT, ClassName

T = TypeVar("T")


@dataclass(slots=True)
class Views(Generic[T]):
    """The waiting requests by class, each in the order of the one list they came from."""

    short: list[T] = field(default_factory=list)
    long: list[T] = field(default_factory=list)

    def of(self, cls: ClassName) -> list[T]:
        """The view of one class."""
        return self.short if cls == SHORT else self.long


def split(waiting: Iterable[T], class_of: Callable[[T], ClassName]) -> Views[T]:
    """Partition `waiting`; every request lands in exactly one view."""
    views: Views[T] = Views()
    short, long = views.short.append, views.long.append
    for request in waiting:
        (short if class_of(request) == SHORT else long)(request)
    return views


class DualQueue(Generic[T]):
    """The views of one list of waiting requests, kept from round to round: only what came since is classed.

    Others own that list and may do anything to it. Where it no longer begins with what was seen last, all of it is
    classed again; else a round costs what came, plus a comparison of two lists that runs at C speed.
    """

    def __init__(self) -> None:
        self._seen: list[T] = []
        self._views: Views[T] = Views()

    def views(self, waiting: list[T], class_of: Callable[[T], ClassName]) -> Views[T]:
        """Return the same as ``split``; read only."""
        if waiting[: len(self._seen)] != self._seen:
            self.forget()
        came = split(waiting[len(self._seen) :], class_of)
        self._views.short += came.short
        self._views.long += came.long
        self._seen = list(waiting)
        return self._views

    def peek(self, waiting: list[T], class_of: Callable[[T], ClassName]) -> Views[T]:
        """The same for somebody who only looks: nothing is kept."""
        known = len(self._seen)
        if waiting[:known] != self._seen:
            return split(waiting, class_of)
        came = split(waiting[known:], class_of)
        return Views(self._views.short + came.short, self._views.long + came.long)

    def forget(self) -> None:
        """A request's class has changed."""
        self._seen, self._views = [], Views()

    def took(self, cls: ClassName, gone: set[int], left: Sequence[T]) -> None:
        """Requests with these ids were batched, those of `cls` and perhaps others; `left` is the list without them."""
        if not self._seen:
            return
        view, other = self._views.of(cls), self._views.of(LONG if cls == SHORT else SHORT)
        before = len(view)
        view[:] = without(view, gone)
        if before - len(view) < len(gone):
            other[:] = without(other, gone)
        self._seen = list(left)


def without(items: list[T], gone: set[int]) -> list[T]:
    """`items` less those with these ids. Costs a step for each up to the last of them; the rest is copied at once."""
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
    """(ids of what is in `before` alone, what is in `after` alone); `after` may be in another order.

    As cheap as ``without`` where `after` is `before` less some of its first requests.
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
