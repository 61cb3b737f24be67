"""What has happened so far. One place; the status, the page and the metrics all read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from laps_core.pools.pressure import Pool


def _by_class() -> dict[Pool, int]:
    return {"short": 0, "long": 0}


@dataclass(slots=True)
class Counts:
    """Totals since the start (requests, unless said otherwise)."""

    requests: dict[Pool, int] = field(default_factory=_by_class)
    """By class."""
    spilled: dict[Pool, int] = field(default_factory=_by_class)
    """By class: sent to the other pool."""
    tokens: dict[Pool, int] = field(default_factory=_by_class)
    """By class: new tokens expected."""
    prefix_tokens: int = 0
    """Tokens expected to be found in a cache."""
    moves: dict[Pool, int] = field(default_factory=_by_class)
    """Instances moved, by the pool they moved to."""
    copied: int = 0
    """Sent to the short pool so that a prefix that several requests share is held there too."""
    retried: int = 0
    """Sent to another instance because a connection failed before anything was answered."""
    failed: int = 0
    """Answered 502 or 504, or cut off in the middle of a stream."""
    rejected: int = 0
    """Answered 503 at once: too many in flight, or nobody healthy."""
    refused: int = 0
    """Answered 4xx by the router: no JSON object, or a bad deadline header."""
    disconnected: int = 0
    """The client went away first."""
