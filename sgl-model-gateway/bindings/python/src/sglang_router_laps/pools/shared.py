"""Prefixes that several requests share: when one of them is worth a copy in the short pool."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from ..servers.prefixes import Fingerprint

SHARERS = 3
"""Requests that go on differently after one prefix before it is copied. A conversation that is tried again or branches
off once gives two; a system prompt gives as many as it has users."""
WATCHED = 1024
"""Prefixes watched at a time; the one longest unused is forgotten."""

Rest = bytes | Sequence[int]


class _Watched:
    __slots__ = ("copies", "count", "rests")

    def __init__(self) -> None:
        self.rests: deque[Rest] = deque(maxlen=SHARERS)
        self.count = 0
        self.copies = 0


class SharedPrefixes:
    """Counts the distinct continuations of held prefixes.

    A copy that was lost (evicted, or its server moved) is made again, each time after twice as many requests: where
    the short pool has no room for a prefix, it is not filled with it again and again.
    """

    def __init__(self) -> None:
        self._watched: OrderedDict[int, _Watched] = OrderedDict()

    def __len__(self) -> int:
        return len(self._watched)

    def due(self, prompt: Fingerprint, blocks: int) -> bool:
        """Note that ``prompt`` goes on after ``blocks`` (> 0) that a server holds; whether these are to be copied."""
        if prompt.prompt is None:
            # Not a new request but another try of one.
            return False
        rest = prompt.beyond(blocks)
        if not rest:
            return False
        key = prompt.hashes[blocks - 1]
        seen = self._watched.setdefault(key, _Watched())
        self._watched.move_to_end(key)
        if len(self._watched) > WATCHED:
            self._watched.popitem(last=False)
        # The next turn of one conversation begins as its last one did; the same request again is no other either.
        for i, r in enumerate(seen.rests):
            if rest[: len(r)] == r[: len(rest)]:
                seen.rests[i] = max(r, rest, key=len)
                break
        else:
            seen.rests.append(rest)
            seen.count += 1
        return seen.count >= SHARERS << seen.copies

    def copied(self, prompt: Fingerprint, blocks: int) -> None:
        """A copy of the first ``blocks`` of ``prompt`` is being made: count from the start."""
        seen = self._watched[prompt.hashes[blocks - 1]]
        seen.rests.clear()
        seen.count = 0
        seen.copies += 1

    def clear(self) -> None:
        """The servers' caches are being flushed."""
        self._watched.clear()
