"""Data-parallel ranks of a prefill server. Each is a scheduler with its own queue and prefix cache; a request's
bootstrap room selects the rank."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from laps_core.length import ClassName
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.prefixes import PrefixIndex
from laps_core.protocol import Assignment

RANKS_MAX = 1024
"""Most ranks tracked; a server that reports more counts as having one. Each rank costs the router memory and time."""
FULL_INDEXES = 8
"""Largest total size of all prefix indexes of a server's ranks, in multiples of the index of a one-rank server."""


class _Server(Protocol):
    pool: Assignment


S = TypeVar("S", bound=_Server)


class Rank(Generic[S]):
    """One of several ranks of a server, with this router's work in flight at the rank. The choice of a server treats a
    rank like a server with a single rank."""

    __slots__ = (
        "number", "of", "outlook", "outstanding", "outstanding_tokens", "prefixes", "rank", "served_tokens", "server",
    )  # fmt: skip

    def __init__(self, server: S, number: int, of: int, learnt: Learnt, tokens: int) -> None:
        """``tokens``: size of the prefix index of a server with one rank."""
        self.server = server
        self.rank = self
        self.number, self.of = number, of
        self.prefixes = PrefixIndex(self.share(tokens))
        self.outlook = Outlook(learnt)
        self.outstanding = self.outstanding_tokens = self.served_tokens = 0

    @property
    def pool(self) -> Assignment:
        return self.server.pool

    def share(self, tokens: int) -> int:
        """Return the size of this rank's prefix index (tokens), if the index of a one-rank server holds ``tokens``."""
        return tokens * min(self.of, FULL_INDEXES) // self.of

    def room(self, number: int) -> int:
        """Return a bootstrap room near ``number`` that the server maps to this rank."""
        return number - number % self.of + self.number

    def entered(self, now: float, tokens: int, cls: ClassName, work_s: float) -> None:
        """Add a request of ``tokens`` new tokens and ``work_s`` (seconds) that is being sent."""
        self.outlook.enter(now, cls, work_s)
        self.outstanding += 1
        self.outstanding_tokens += tokens
        self.served_tokens += tokens

    def left(self, now: float, tokens: int, cls: ClassName, work_s: float, answered: bool) -> None:
        self.outlook.leave(now, cls, work_s, tokens if answered else 0)
        self.outstanding -= 1
        self.outstanding_tokens -= tokens
