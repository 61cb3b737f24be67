"""Length classes: which requests are short, which are long (LAPS, s2.1, s3)."""

from __future__ import annotations

import math
from typing import Final, Literal

ClassName = Literal["short", "long"]
"""Class of a request by its length, and of the pool that serves such requests."""
SHORT: Final[ClassName] = "short"
LONG: Final[ClassName] = "long"
CLASSES: tuple[ClassName, ClassName] = (SHORT, LONG)


def classify(new_tokens: int, threshold: int) -> ClassName:
    """Class of a request with `new_tokens` tokens to compute; `threshold` (tokens) itself is short."""
    return SHORT if new_tokens <= threshold else LONG


def new_tokens(prompt_tokens: int, matched_tokens: int, basis: str) -> int:
    """Tokens that count for the class: the uncached ones, or with `basis` "prompt" all of them.

    At least one token is always computed, however long the match.
    """
    return prompt_tokens if basis == "prompt" else max(1, prompt_tokens - matched_tokens)


def unit_of(page_size: int, align: int | None) -> int:
    """The unit (tokens) in which a prompt is cut into chunks: whole pages, and what SGLang aligns cuts to, if anything.

    SGLang rounds what is not a multiple of it down: a first chunk of less than one unit would hold no token.
    """
    return math.lcm(page_size, align or 1)


def usable_threshold(threshold: int, chunk_tokens: int | None, page_size: int) -> int:
    """The threshold (tokens) that a chunk budget allows.

    A short request must fit one batch whole, in whole pages: above this it would be cut into chunks, which
    only the long class may be. `chunk_tokens` None = prefills are not cut.
    """
    if chunk_tokens is None:
        return threshold
    return max(1, min(threshold, chunk_tokens // page_size * page_size))
