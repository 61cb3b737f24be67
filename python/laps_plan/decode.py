"""Cost of decode steps: each step reads the weights once, and the KV cache of every stream."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Decode steps of one model on one device. Times in seconds."""

    streams: Sequence[int]
    """Numbers of streams with a known step time, rising."""
    seconds: Sequence[float]
    """Time of a step for each number in ``streams``, without the time to read the contexts; never falling."""
    context: float
    """Time to read one token of context; a step reads the contexts of all streams."""

    def step_s(self, streams: int, context: float) -> float:
        """Return the time of a step of ``streams`` streams (at least 1) with ``context`` tokens of context in total."""
        return self.rows_s(streams) + self.context * context

    def rows_s(self, streams: int) -> float:
        """Return the time of a step without the time to read the contexts: interpolated on a line between two known
        numbers of streams, extrapolated beyond the last on the line through the last two."""
        known, seconds = self.streams, self.seconds
        i = min(max(bisect_right(known, streams), 1), len(known) - 1)
        low, high = known[i - 1], known[i]
        share = (max(streams, known[0]) - low) / (high - low)
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def stretched(self, slow: float) -> DecodeCost:
        """Return the cost on a device that takes ``slow`` times as long."""
        return replace(self, seconds=[slow * s for s in self.seconds], context=slow * self.context)
