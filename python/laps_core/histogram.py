"""How long the requests were that came: counted in few numbers, whoever counts them."""

from __future__ import annotations

import math

from laps_core.protocol import Bucket, Lengths

BUCKETS = 48
"""The last one ends at 2^23.5 tokens, and takes what is longer too."""


def bucket_of(new_tokens: int) -> int:
    """The bucket of a request with so many tokens to compute (>= 1): each ends sqrt(2) times further than the last."""
    squared = new_tokens * new_tokens
    return min(BUCKETS - 1, max(0, squared - 1).bit_length())


def upper(bucket: int) -> int:
    """The most tokens of a request in it."""
    return math.isqrt(1 << bucket)


class LengthCount:
    """Requests and their tokens, by power of sqrt(2) of new tokens."""

    def __init__(self) -> None:
        self._counts: list[tuple[int, int, int]] = [(0, 0, 0)] * BUCKETS

    def add(self, new_tokens: int, cached_tokens: int) -> None:
        """A request came; of its prompt so much has to be computed and so much is in the prefix cache."""
        i = bucket_of(new_tokens)
        requests, new, cached = self._counts[i]
        self._counts[i] = requests + 1, new + new_tokens, cached + cached_tokens

    def told(self, seconds: float) -> Lengths:
        """Return the counts of a time of ``seconds``."""
        filled = [
            Bucket(up_to=upper(i), requests=requests, new_tokens=new, cached_tokens=cached)
            for i, (requests, new, cached) in enumerate(self._counts)
            if requests
        ]
        return Lengths(seconds=seconds, buckets=filled)
