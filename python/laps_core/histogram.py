"""Histogram of request lengths, in few numbers."""

from __future__ import annotations

import math

from laps_core.protocol import Bucket, Lengths

BUCKETS = 48
"""Number of buckets. The last bucket ends at 2^23.5 tokens, and also counts longer requests."""


def bucket_of(new_tokens: int) -> int:
    """Return the bucket of a request. `new_tokens` >= 1; each bucket ends at sqrt(2) times the end of the last one."""
    squared = new_tokens * new_tokens
    return min(BUCKETS - 1, max(0, squared - 1).bit_length())


def upper(bucket: int) -> int:
    """Return the most new tokens of a request in `bucket`."""
    return math.isqrt(1 << bucket)


class LengthCount:
    """Counts of requests and of their tokens, by powers of sqrt(2) of new tokens."""

    def __init__(self) -> None:
        self._counts: list[tuple[int, int, int]] = [(0, 0, 0)] * BUCKETS

    def add(self, new_tokens: int, cached_tokens: int) -> None:
        """Count an arrived request, with these new tokens, and these tokens in the prefix cache."""
        i = bucket_of(new_tokens)
        requests, new, cached = self._counts[i]
        self._counts[i] = requests + 1, new + new_tokens, cached + cached_tokens

    def to_lengths(self, seconds: float) -> Lengths:
        """Return the counts, which cover the last ``seconds``."""
        filled = [
            Bucket(up_to=upper(i), requests=requests, new_tokens=new, cached_tokens=cached)
            for i, (requests, new, cached) in enumerate(self._counts)
            if requests
        ]
        return Lengths(seconds=seconds, buckets=filled)
