"""The dual queue: two views over the one list of waiting requests, and whose turn it is [L s3.1]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sglang_laps.policy.length import LONG, SHORT, LengthClass

T = TypeVar("T")


@dataclass(slots=True)
class Views(Generic[T]):
    """The waiting requests by class, each in the order of the one list they came from."""

    short: list[T] = field(default_factory=list)
    long: list[T] = field(default_factory=list)

    def of(self, cls: LengthClass) -> list[T]:
        """The view of one class."""
        return self.short if cls is SHORT else self.long


def split(waiting: Iterable[T], class_of: Callable[[T], LengthClass]) -> Views[T]:
    """Partition `waiting`; every request lands in exactly one view."""
    views: Views[T] = Views()
    short, long = views.short.append, views.long.append
    for request in waiting:
        (short if class_of(request) is SHORT else long)(request)
    return views


def turn(*, short: bool, long: bool, long_owed: bool, urgent: LengthClass | None = None) -> tuple[LengthClass, ...]:
    """Which class to batch next, and which to try if that one cannot run (no memory, say).

    short, long: whether the class has work; a long prefill parked between chunks is long work.
    long_owed: whether the long class is behind its share (see ``fairness.LongShare``).
    urgent: the class that holds the strictly higher request priority, if the server schedules by priority.
    """
    if not (short and long):
        return ((SHORT,) if short else ()) + ((LONG,) if long else ())
    first = urgent or (LONG if long_owed else SHORT)
    return (first, LONG if first is SHORT else SHORT)
