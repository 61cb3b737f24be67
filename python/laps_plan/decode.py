"""How long decode steps take: the weights are read once a step, the KV cache of every stream, too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Decode steps of one model on one device. Times in seconds."""

    streams: Sequence[int]
    """Numbers of streams that ``seconds`` are known of, rising."""
    seconds: Sequence[float]
    """Time of a step of so many streams, without what reading their contexts takes; never falling."""
    context: float
    """For each token of context, of all streams together."""

    def step_s(self, streams: int, context: float) -> float:
        """Time of a step of so many streams (from 1 on), whose contexts are so many tokens in all."""
        return self.rows_s(streams) + self.context * context

    def rows_s(self, streams: int) -> float:
        """Time of a step without what reading the contexts takes: between two known numbers on the line through
        them, beyond the last on that of the last two."""
        known, seconds = self.streams, self.seconds
        i = min(max(bisect_right(known, streams), 1), len(known) - 1)
        low, high = known[i - 1], known[i]
        share = (max(streams, known[0]) - low) / (high - low)
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def stretched(self, slow: float) -> DecodeCost:
        """The same on a device that takes so many times as long."""
        return replace(self, seconds=[slow * s for s in self.seconds], context=slow * self.context)
