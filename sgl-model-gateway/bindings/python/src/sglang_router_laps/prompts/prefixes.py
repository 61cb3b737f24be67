"""Which prefixes an instance has seen: a bounded index of chained block hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_BYTES = 256
"""One block of text; about 64 tokens of English."""
BLOCK_IDS = 64
"""One block of token ids."""
TOKENS_PER_BLOCK = 64


@dataclass(slots=True)
class Fingerprint:
    """A prompt cut into whole blocks, each hash covering all before it."""

    hashes: tuple[int, ...]
    covered: float
    """Share of the prompt that one block is (0..1)."""
    media: tuple[int, ...] = ()
    """For each image, video or audio part the block that it ends in, counted from 0."""
    prompt: bytes | Sequence[int] | None = None
    """The prompt itself, until the request has been compared with others."""

    def beyond(self, blocks: int) -> bytes | Sequence[int]:
        """What comes after the first ``blocks`` of the prompt, one block at most. The prompt must still be there."""
        assert self.prompt is not None
        size = block_size(self.prompt)
        return self.prompt[blocks * size : (blocks + 1) * size]


EMPTY = Fingerprint((), 0.0)


def block_size(prompt: bytes | Sequence[int]) -> int:
    """Bytes or ids of one block."""
    return BLOCK_BYTES if isinstance(prompt, bytes) else BLOCK_IDS


def fingerprint(prompt: bytes | Sequence[int], media_at: Sequence[int] = ()) -> Fingerprint:
    """Of UTF-8 text, with media that end at these bytes of it, or of token ids.

    A prompt of less than one block has no hashes.
    """
    size = block_size(prompt)
    if len(prompt) < size:
        return EMPTY
    chain, hashes = 0, []
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
        self._limit = tokens // TOKENS_PER_BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def depth(self, prompt: Fingerprint) -> int:
        """How many blocks of ``prompt`` are held, by bisection."""
        blocks = self._blocks
        low, high = 0, len(prompt.hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if prompt.hashes[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, prompt: Fingerprint) -> None:
        """Note that the instance is about to hold ``prompt``."""
        blocks = self._blocks
        for h in reversed(prompt.hashes[: self._limit]):
            blocks[h] = None
            blocks.move_to_end(h)
        while len(blocks) > self._limit:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the instance was restarted or its cache flushed."""
        self._blocks.clear()
