"""Prefix lookup: token counts and chained block hashes of prompts, and the blocks that each server has cached."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK_BYTES = 256
"""Size of a block of text (bytes of UTF-8): about 64 tokens of English."""
BLOCK_IDS = 64
"""Size of a block of token ids (tokens)."""
TOKENS_PER_BLOCK = 64
SHARERS = 3
"""Number of distinct continuations from which a prefix is copied. A conversation that is retried or branches off once
has two; a system prompt has as many as it has users."""
MEDIA_TOKENS = 512
"""Tokens counted for one image, video or audio part. Models and resolutions differ widely, so each part makes a request
long."""
PROMPTS_MAX = 64
"""Most prompts of a batch that are looked up in the prefix indexes; these prompts stand for the rest."""
HALF = 0.5
"""Share of the expected cached tokens (0..1); a server that finds fewer has evicted some of them."""
WATCHED = 1024
"""Most prefixes watched at the same time; the least recently used one is forgotten."""

Tokens = bytes | Sequence[int]
"""UTF-8 text, or token ids."""


@dataclass(slots=True)
class Fingerprint:
    """A prompt cut into whole blocks. The hash of a block covers all earlier blocks, too."""

    hashes: tuple[int, ...]
    covered: float
    """Share of the prompt in one block (0..1)."""
    media: tuple[int, ...] = ()
    """Block in which each image, video or audio part ends, counted from 0."""
    prompt: Tokens | None = None
    """Text or ids of the prompt; None after ``Pools.record_choice`` has recorded the request."""


EMPTY = Fingerprint((), 0.0)


def block_size(prompt: Tokens) -> int:
    """Return the size of a block (bytes or ids)."""
    return BLOCK_BYTES if isinstance(prompt, bytes) else BLOCK_IDS


def fingerprint(prompt: Tokens, media_at: Sequence[int] = (), seed: int = 0) -> Fingerprint:
    """Return the fingerprint of UTF-8 text or token ids. ``media_at``: bytes of the text at which media parts end.
    Another ``seed`` gives other hashes.

    A prompt shorter than one block has no hashes.
    """
    size = block_size(prompt)
    if len(prompt) < size:
        return EMPTY
    chain, hashes = seed, []
    for at in range(0, len(prompt) - size + 1, size):
        block = prompt[at : at + size]
        chain = hash((chain, block if isinstance(block, bytes) else tuple(block)))
        hashes.append(chain)
    return Fingerprint(tuple(hashes), size / len(prompt), tuple((at - 1) // size for at in media_at), prompt)


class PrefixIndex:
    """Blocks that one instance is expected to have cached, up to ``tokens``; the least recently used ones are dropped.

    A block is never used more recently than the blocks before it, so the cached part of a prompt is always a prefix.
    """

    def __init__(self, tokens: int) -> None:
        self._limit = 0
        self.bound(tokens)
        self.blocks: OrderedDict[int, None] = OrderedDict()
        """Blocks held, the least recently used first."""

    def __len__(self) -> int:
        return len(self.blocks)

    def bound(self, tokens: int) -> None:
        """Bound the index to ``tokens`` from now on; the next ``add`` drops the excess."""
        self._limit = tokens // TOKENS_PER_BLOCK

    def depth(self, prompt: Fingerprint) -> int:
        """Return the number of blocks of ``prompt`` in the index."""
        hashes = prompt.hashes
        if not hashes or hashes[0] not in self.blocks:
            return 0
        return bisect_left(hashes, True, key=lambda h: h not in self.blocks)

    def add(self, prompt: Fingerprint) -> None:
        """Add the blocks of ``prompt``, which the instance is about to cache."""
        blocks = self.blocks
        for h in reversed(prompt.hashes[: self._limit]):
            blocks[h] = None
            blocks.move_to_end(h)
        while len(blocks) > self._limit:
            blocks.popitem(last=False)

    def correct(self, expected: int, found: int) -> None:
        """Drop the oldest quarter of the blocks if a server ``found`` far fewer cached tokens than ``expected``: the
        server evicts sooner than this index does."""
        if found < HALF * expected and expected > TOKENS_PER_BLOCK:
            for _ in range(len(self.blocks) // 4):
                self.blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks: the instance was restarted, or its cache was flushed."""
        self.blocks.clear()


@dataclass(slots=True)
class Ask:
    """Prompts of one request, with its deadline and session."""

    tokens: int
    """Tokens of all texts and ids, without media."""
    prompts: Sequence[Fingerprint] = ()
    media: int = 0
    """Media parts at unknown positions in the prompts; assumed not to be cached."""
    slo_s: float | None = None
    """Deadline after arrival (seconds)."""
    refuse_at: float = math.inf
    """Time from which the request is refused if it has no first token (monotonic seconds)."""
    session: str | None = None
    """Session name given by the client."""

    @property
    def total(self) -> int:
        """Return the tokens of the whole request, with media."""
        return self.tokens + (self.media + sum(len(p.media) for p in self.prompts)) * MEDIA_TOKENS

    def new(self, index: PrefixIndex) -> int:
        """Return the expected new tokens of the request on a server that has the blocks of ``index`` cached (>= 1)."""
        share, media = 0.0, self.media
        for p in self.prompts:
            depth = index.depth(p)
            share += depth * p.covered
            if p.media:
                media += sum(block >= depth for block in p.media)
        if share:
            # The cached share of a batch is the mean over its prompts: an estimate that needs no prompt lengths.
            share /= len(self.prompts)
        return max(1, round(self.tokens * (1 - share)) + media * MEDIA_TOKENS)


NOTHING = Ask(0)
"""Placeholder for a prompt that is unknown, or no longer needed."""


@dataclass(slots=True)
class _Watched:
    rests: deque[Tokens] = field(default_factory=lambda: deque(maxlen=SHARERS))
    count: int = 0
    copies: int = 0

    def known(self, rest: Tokens) -> int | None:
        """Return the index of a known continuation that agrees with ``rest`` as far as both go; None if there is none.
        So neither the next turn of a conversation nor a repeated request counts as another continuation."""
        return next((i for i, r in enumerate(self.rests) if rest[: len(r)] == r[: len(rest)]), None)


class SharedPrefixes:
    """Prefixes that several requests share, with their distinct continuations.

    A lost copy (evicted, or its server moved) is made again, each time after twice as many continuations. So a short
    pool with too little memory for a prefix is not filled with it again and again.
    """

    def __init__(self) -> None:
        self._watched: OrderedDict[int, _Watched] = OrderedDict()

    def __len__(self) -> int:
        return len(self._watched)

    def due(self, prompt: Fingerprint, blocks: int) -> bool:
        """Return True if this request should copy the first ``blocks`` (> 0) of ``prompt``, which a server of the long
        pool has cached, to the short pool."""
        rest = self._rest(prompt, blocks)
        seen = self._watched.get(prompt.hashes[blocks - 1]) or _Watched()
        return bool(rest) and seen.count + (seen.known(rest) is None) >= SHARERS << seen.copies

    def note(self, prompt: Fingerprint, blocks: int) -> None:
        """Record how ``prompt`` continues after its first ``blocks`` (> 0)."""
        rest = self._rest(prompt, blocks)
        if not rest:
            return
        key = prompt.hashes[blocks - 1]
        seen = self._watched.setdefault(key, _Watched())
        self._watched.move_to_end(key)
        if len(self._watched) > WATCHED:
            self._watched.popitem(last=False)
        at = seen.known(rest)
        if at is None:
            seen.rests.append(rest)
            seen.count += 1
        else:
            seen.rests[at] = max(seen.rests[at], rest, key=len)

    @staticmethod
    def _rest(prompt: Fingerprint, blocks: int) -> Tokens:
        """Return the block after the first ``blocks`` of ``prompt``; empty for a retry, which is not a new request."""
        if prompt.prompt is None:
            return b""
        size = block_size(prompt.prompt)
        return prompt.prompt[blocks * size : (blocks + 1) * size]

    def copied(self, prompt: Fingerprint, blocks: int) -> None:
        """Restart the count of continuations: a copy of the first ``blocks`` of ``prompt`` is being made."""
        seen = self._watched[prompt.hashes[blocks - 1]]
        seen.rests.clear()
        seen.count = 0
        seen.copies += 1

    def clear(self) -> None:
        """Forget all prefixes: the servers' caches are being flushed."""
        self._watched.clear()
