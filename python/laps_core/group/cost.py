"""Time of a step of data-parallel attention ranks: own parts, experts, and a fixed time.

Each rank computes attention and projections of its own requests (its own part). The experts process the tokens of all
ranks. All ranks wait for the slowest, so a step takes ``fixed + max over ranks (own) + experts``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from laps_core.latency.boundary import knee
from laps_core.latency.step import Cost, StepShape

GRAIN = 64
"""Granularity of chunks (tokens), so that chunks fill pages and kernel tiles."""


class OwnShape(NamedTuple):
    """Sums over a rank's batch that determine its own part."""

    tokens: int
    """Sum of L (new tokens)."""
    attention: int
    """Sum of L (L + 2H) over requests whose history is unpacked (tokens^2)."""
    history: int
    """Sum of H over requests whose history is unpacked (tokens)."""
    absorbed: int
    """Sum of L (L + 2H) over requests whose history stays packed (tokens^2)."""


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """Terms of a group's step. None is negative; times in seconds."""

    ranks: int
    fixed: Cost
    """Fixed time of every step, including the host's."""
    token: Cost
    """Own part, per new token: projections, dispatch and combine, shared experts."""
    alpha: Cost
    """Own part, per L (L + 2H): attention."""
    unpack: Cost = 0.0
    """Own part, per history token of each chunk: reading the cache, and for MLA also unpacking K and V."""
    absorbed: Cost | None = None
    """Own part, per L (L + 2H), if MLA attends to the packed cache (no ``unpack``); None = no such path."""
    own_floor: Cost = 0.0
    """Least own part of a rank with any tokens: launches, and reading the weights."""
    expert: Cost
    """Experts, per token."""
    expert_floor: Cost = 0.0
    """Least time of the experts."""
    padded: bool = False
    """True if every rank's tokens are padded to the largest rank's: experts process ``ranks`` times that."""

    @property
    def step_s(self) -> float:
        """Time of the smallest step."""
        return self.fixed + self.own_floor + self.expert_floor

    def stretched(self, slow: float) -> GroupCost:
        """Return the cost on devices that take ``slow`` times as long for everything."""
        terms = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("ranks", "padded")}
        more: dict[str, Any] = {name: None if term is None else slow * term for name, term in terms.items()}
        return replace(self, **more)

    def unpacks(self, new: int, history: int) -> bool:
        """Return True if unpacking a request's history is not slower than attending to the packed cache."""
        if self.absorbed is None:
            return True
        pairs = new * (new + 2 * history)
        return self.alpha * pairs + self.unpack * history <= self.absorbed * pairs

    def attention_s(self, new: int, history: int) -> float:
        """Return the attention time of a request in one chunk."""
        pairs = new * (new + 2 * history)
        took = self.alpha * pairs + self.unpack * history
        return took if self.absorbed is None else min(took, self.absorbed * pairs)

    def own_s(self, tokens: int, attention_s: float) -> float:
        """Return the own part of a rank's batch; 0 if it is idle."""
        return max(self.own_floor, self.token * tokens + attention_s) if tokens else 0.0

    def experts_s(self, tokens: Sequence[int]) -> float:
        """Return the experts' part of a step, from the new tokens of each rank."""
        seen = self.ranks * max(tokens) if self.padded else sum(tokens)
        return max(self.expert_floor, self.expert * seen)

    def seconds(self, shapes: Sequence[OwnShape]) -> float:
        """Return the time of a step, from the batch of each rank."""
        own = max(self.own_s(s.tokens, self.shape_s(s)) for s in shapes)
        return self.fixed + own + self.experts_s([s.tokens for s in shapes])

    def shape(self, requests: Iterable[tuple[int, int]]) -> OwnShape:
        """Return the sums over a rank's requests, each given as (new, history) tokens."""
        both: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for new, history in requests:
            both[self.unpacks(new, history)].append((new, history))
        absorbed, unpacked = map(StepShape.of, both)
        return OwnShape(absorbed.tokens + unpacked.tokens, unpacked.attention, unpacked.history, absorbed.attention)

    def shape_s(self, shape: OwnShape) -> float:
        """Return the attention time of a batch."""
        absorbed = self.alpha if self.absorbed is None else self.absorbed
        return self.alpha * shape.attention + self.unpack * shape.history + absorbed * shape.absorbed

    def work_s(self, new: int, history: int) -> float:
        """Return the time that a request adds to a step above its floors: own part and experts."""
        return (self.token + self.expert) * new + self.attention_s(new, history)

    def useful_s(self, new: int, history: int) -> float:
        """Return the own part of these tokens without ``unpack``, the extra cost of smaller chunks."""
        return self.token * new + self.alpha * new * (new + 2 * history)

    def lone_s(self, new: int, history: int, chunk: int) -> float:
        """Return the time to first token of a request alone in the group, in chunks of at most ``chunk`` tokens."""
        seconds = 0.0
        while new > 0:
            n = min(new, chunk)
            own = self.own_s(n, self.attention_s(n, history))
            seconds += self.fixed + own + self.experts_s([n])
            new, history = new - n, history + n
        return seconds

    def most_tokens(self, left_s: float, history: int) -> int:
        """Return how many new tokens after ``history`` take at most ``left_s`` of own part; a multiple of GRAIN."""
        paths = [(self.alpha, self.unpack * history)]
        if self.absorbed is not None:
            paths.append((self.absorbed, 0.0))
        best = 0.0
        for pair, before_s in paths:
            if (room := left_s - before_s) > 0.0:
                found = knee(pair, self.token + 2.0 * pair * history, room)
                best = max(best, found if found < math.inf else 0.0)
        return int(best) // GRAIN * GRAIN
