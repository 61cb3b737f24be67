"""What a request asks to be prefilled, and which prefixes of it servers hold: token counts and chained block hashes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .reading import Prompt
from .tokens import START_BYTES_PER_TOKEN, TokenCounter

BLOCK_BYTES = 256
"""One block of text; about 64 tokens of English."""
BLOCK_IDS = 64
"""One block of token ids."""
TOKENS_PER_BLOCK = 64
SHARERS = 3
"""Requests that go on differently after one prefix before it is copied. A conversation that is tried again or branches
off once gives two; a system prompt gives as many as it has users."""
MEDIA_TOKENS = 512
"""What one image, video or audio part counts. Models and resolutions differ widely: with one, a request is long."""
PROMPTS_MAX = 64
"""Of a batch, so many prompts are looked up in the prefix indexes: they stand for the rest."""
HALF = 0.5
"""A server that holds less than this share of what it is thought to hold has forgotten it (0..1)."""
WATCHED = 1024
"""Prefixes watched at a time; the one longest unused is forgotten."""

Tokens = bytes | Sequence[int]
"""UTF-8 text, or token ids."""


@dataclass(slots=True)
class Fingerprint:
    """A prompt cut into whole blocks, each hash covering all before it."""

    hashes: tuple[int, ...]
    covered: float
    """Share of the prompt that one block is (0..1)."""
    media: tuple[int, ...] = ()
    """For each image, video or audio part the block that it ends in, counted from 0."""
    prompt: Tokens | None = None
    """The prompt itself, until the request has been compared with others."""


EMPTY = Fingerprint((), 0.0)


def block_size(prompt: Tokens) -> int:
    """Bytes or ids of one block."""
    return BLOCK_BYTES if isinstance(prompt, bytes) else BLOCK_IDS


def fingerprint(prompt: Tokens, media_at: Sequence[int] = (), seed: int = 0) -> Fingerprint:
    """Of UTF-8 text, with media that end at these bytes of it, or of token ids. Another ``seed``, another prompt.

    A prompt of less than one block has no hashes.
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
    """Least-recently-used blocks of one instance, at most ``tokens`` of them (tokens).

    A block is never younger than the blocks before it, so what is held of a prompt is always a prefix of it.
    """

    def __init__(self, tokens: int) -> None:
        self._limit = 0
        self.bound(tokens)
        self.blocks: OrderedDict[int, None] = OrderedDict()
        """Those held; the one longest unused first."""

    def __len__(self) -> int:
        return len(self.blocks)

    def bound(self, tokens: int) -> None:
        """From now on hold at most ``tokens``; what is too much goes with the next prompt."""
        self._limit = tokens // TOKENS_PER_BLOCK

    def depth(self, prompt: Fingerprint) -> int:
        """How many blocks of ``prompt`` are held."""
        hashes = prompt.hashes
        if not hashes or hashes[0] not in self.blocks:
            return 0
        return bisect_left(hashes, True, key=lambda h: h not in self.blocks)

    def add(self, prompt: Fingerprint) -> None:
        """Note that the instance is about to hold ``prompt``."""
        blocks = self.blocks
        for h in reversed(prompt.hashes[: self._limit]):
            blocks[h] = None
            blocks.move_to_end(h)
        while len(blocks) > self._limit:
            blocks.popitem(last=False)

    def correct(self, expected: int, found: int) -> None:
        """Of a prompt of which so many tokens were ``expected`` to be held the server ``found`` fewer: it forgets
        sooner than this index, and so what is oldest here is taken to be gone there."""
        if found < HALF * expected and expected > TOKENS_PER_BLOCK:
            for _ in range(len(self.blocks) // 4):
                self.blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the instance was restarted or its cache flushed."""
        self.blocks.clear()


@dataclass(slots=True)
class Ask:
    """The prompts of one request."""

    tokens: int
    """Of texts and ids."""
    prompts: Sequence[Fingerprint] = ()
    media: int = 0
    """Such parts whose place in the prompt is not known: no server is taken to hold them."""
    slo_s: float | None = None
    """Its deadline, after its arrival (seconds)."""
    until: float = math.inf
    """When it is to be refused without a first token (monotonic seconds)."""
    session: str | None = None
    """The client's name of what it goes on with."""

    @property
    def total(self) -> int:
        """Tokens of all of it."""
        return self.tokens + (self.media + sum(len(p.media) for p in self.prompts)) * MEDIA_TOKENS

    def new(self, index: PrefixIndex) -> int:
        """Tokens expected to be computed where ``index`` tells what is held (>= 1)."""
        share, media = 0.0, self.media
        for p in self.prompts:
            depth = index.depth(p)
            share += depth * p.covered
            if p.media:
                media += sum(block >= depth for block in p.media)
        if share:
            # Of a batch the share is the mean over its prompts: an estimate that needs no lengths.
            share /= len(self.prompts)
        return max(1, round(self.tokens * (1 - share)) + media * MEDIA_TOKENS)


NOTHING = Ask(0)
"""What a request asks whose prompt is not known yet, or of no more use."""


def measure(prompt: Prompt, counter: TokenCounter, size: int) -> Ask:
    """Measure ``prompt``, of a request body of ``size`` bytes.

    What could not be read may be as long as the body allows.
    """
    tokens = counter.count(prompt)
    if prompt.unread:
        tokens = max(tokens, round(size / START_BYTES_PER_TOKEN))
    texts, seed = (t.encode("utf-8", "surrogatepass") for t in prompt.texts[:PROMPTS_MAX]), prompt.seed
    prints = [fingerprint(t, prompt.media_at, seed) for t in texts]
    prints += [fingerprint(i, seed=seed) for i in prompt.ids[: PROMPTS_MAX - len(prints)]]
    return Ask(tokens, prints, prompt.media - sum(len(p.media) for p in prints))


@dataclass(slots=True)
class _Watched:
    rests: deque[Tokens] = field(default_factory=lambda: deque(maxlen=SHARERS))
    count: int = 0
    copies: int = 0


class SharedPrefixes:
    """Prefixes that several requests share, by their distinct continuations: when one is worth a copy.

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
        size = block_size(prompt.prompt)
        rest = prompt.prompt[blocks * size : (blocks + 1) * size]
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
