"""Length classes: short and long requests (LAPS, s2.1, s3)."""

from __future__ import annotations

import math
from typing import Final, Literal

ClassName = Literal["short", "long"]
"""Class of a request by its length, and of the pool that serves such requests."""
SHORT: Final[ClassName] = "short"
LONG: Final[ClassName] = "long"
CLASSES: tuple[ClassName, ClassName] = (SHORT, LONG)


def classify(new_tokens: int, threshold: int) -> ClassName:
    """Return the class of a request with `new_tokens` tokens to compute. Exactly `threshold` tokens are short."""
    return SHORT if new_tokens <= threshold else LONG


def new_tokens(prompt_tokens: int, matched_tokens: int, basis: str) -> int:
    """Return the tokens that count for the class: the uncached tokens, or with `basis` "prompt" the whole prompt.

    At least one token is always computed, even if the prefix cache has the whole prompt.
    """
    return prompt_tokens if basis == "prompt" else max(1, prompt_tokens - matched_tokens)


def unit_of(page_size: int, align: int | None) -> int:
    """Return the unit of chunk lengths (tokens): whole pages, and multiples of `align`, SGLang's alignment, if any.

    SGLang rounds chunks down to a multiple of this unit: a chunk of less than one unit would hold no token.
    """
    return math.lcm(page_size, align or 1)


def whole_units(tokens: int, unit: int) -> int:
    """Return `tokens`, rounded up to whole units: pages, which SGLang counts of each request, or units of chunks."""
    return -(-tokens // unit) * unit


def usable_threshold(threshold: int, chunk_tokens: int | None, page_size: int) -> int:
    """Return the threshold (tokens), lowered to what a chunk can hold.

    A short request must fit into one batch, in whole pages, because only long prompts may be cut into chunks.
    `chunk_tokens`: most tokens of a chunk; None = prompts are not cut.
    """
    if chunk_tokens is None:
        return threshold
    return max(1, min(threshold, chunk_tokens // page_size * page_size))
