"""The data-parallel ranks of a prefill server: each is a scheduler with a queue and a prefix cache of its own, and a
request goes to the one that its bootstrap room names."""

from __future__ import annotations

import random
from typing import Generic, Protocol, TypeVar

from laps_core.length import ClassName
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.pressure import Assignment

from ..prompts.prefixes import PrefixIndex

RANKS_MAX = 1024
"""A server that says it has more is taken to have one: each costs memory and time here."""
FULL_INDEXES = 8
"""The prefix indexes of one server's ranks hold together no more than so many of one server's."""
ROOM_BITS = 62


class _Server(Protocol):
    pool: Assignment


S = TypeVar("S", bound=_Server)


class Rank(Generic[S]):
    """One of several of a server, with this router's work in flight there. For the choice it stands where a server
    stands that has one rank only."""

    __slots__ = (
        "number", "of", "outlook", "outstanding", "outstanding_tokens", "prefixes", "rank", "served_tokens", "server",
    )  # fmt: skip

    def __init__(self, server: S, number: int, of: int, learnt: Learnt, tokens: int) -> None:
        """``tokens``: what the prefix index of a server with one rank holds."""
        self.server = server
        self.rank = self
        self.number, self.of = number, of
        self.prefixes = PrefixIndex(self.share(tokens))
        self.outlook = Outlook(learnt)
        self.outstanding = self.outstanding_tokens = self.served_tokens = 0

    @property
    def pool(self) -> Assignment:
        """Its server's."""
        return self.server.pool

    def share(self, tokens: int) -> int:
        """Return the size of this rank's index (tokens), where the index of a server with one rank holds ``tokens``."""
        return tokens * min(self.of, FULL_INDEXES) // self.of

    def room(self) -> int:
        """A fresh bootstrap room that its server takes for it."""
        room = random.getrandbits(ROOM_BITS)
        return room - room % self.of + self.number

    def entered(self, now: float, tokens: int, cls: ClassName, work_s: float) -> None:
        """A request of so many new tokens, and so much work (seconds), is being sent to it."""
        self.outlook.enter(now, cls, work_s)
        self.outstanding += 1
        self.outstanding_tokens += tokens
        self.served_tokens += tokens

    def left(self, now: float, tokens: int, cls: ClassName, work_s: float, answered: bool) -> None:
        """That request has what it came for, or has failed."""
        self.outlook.leave(now, cls, work_s, tokens if answered else 0)
        self.outstanding -= 1
        self.outstanding_tokens -= tokens
