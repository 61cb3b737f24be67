"""The newest measured steps of each shape: bounded, and many of one shape do not push out the few of another."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

PER_STRATUM = 32
STRATA = 64

T = TypeVar("T")


class Strata(Generic[T]):
    """At most PER_STRATUM of each of the STRATA that were added to last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def add(self, stratum: Hashable, sample: T) -> None:
        """Keep a sample, in place of the oldest of its stratum if that is full."""
        if stratum not in self._kept and len(self._kept) == STRATA:
            self._kept.popitem(last=False)
        self._kept.setdefault(stratum, deque(maxlen=PER_STRATUM)).append(sample)
        self._kept.move_to_end(stratum)

    def samples(self) -> list[T]:
        """All that are kept."""
        return [sample for stratum in self._kept.values() for sample in stratum]
