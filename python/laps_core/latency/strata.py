"""The newest measured steps of each shape, bounded, so that frequent shapes do not displace rare ones."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

PER_STRATUM = 32
STRATA = 64

T = TypeVar("T")


class Strata(Generic[T]):
    """Keeps the newest PER_STRATUM samples in each of the STRATA most recently used strata."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def add(self, stratum: Hashable, sample: T) -> None:
        """Keep a sample. If its stratum is full, drop the oldest sample of the stratum."""
        if stratum not in self._kept and len(self._kept) == STRATA:
            self._kept.popitem(last=False)
        self._kept.setdefault(stratum, deque(maxlen=PER_STRATUM)).append(sample)
        self._kept.move_to_end(stratum)

    def samples(self) -> list[T]:
        return [sample for stratum in self._kept.values() for sample in stratum]

    def keep(self, wanted: Callable[[T], bool]) -> None:
        """Drop all samples that are not ``wanted``."""
        for stratum in list(self._kept):
            left = deque(filter(wanted, self._kept.pop(stratum)), maxlen=PER_STRATUM)
            if left:
                self._kept[stratum] = left
