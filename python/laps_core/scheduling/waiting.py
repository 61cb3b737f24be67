"""A request that waits, as every rule of the scheduler sees it."""

from __future__ import annotations

from typing import NamedTuple


class Waiting(NamedTuple):
    """A request that waits, or a long prompt between two of its chunks. Times are seconds of the caller's clock."""

    tokens: int
    """New tokens left."""
    history: int
    """Tokens in the cache, its own finished chunks included."""
    since_s: float
    """When it began to wait."""
    deadline_s: float | None = None
    """When its first token is due."""
    new_tokens: int = 0
    """Tokens to prefill when it came; 0 = what is left."""
    started: bool = False
    """In progress: it has run a chunk."""
    rank: int = 0
    """Priority among long prompts; smaller goes first, whatever the work."""
