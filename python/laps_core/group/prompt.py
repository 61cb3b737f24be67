"""A request that waits on a rank, as the joint plan sees it."""

from __future__ import annotations

from typing import NamedTuple

from laps_core.group.cost import GroupCost


class Prompt(NamedTuple):
    """A request, or a prompt between two of its chunks. It changes when a chunk of it has run: make it anew then."""

    tokens: int
    """New tokens left."""
    history: int
    """Tokens in the cache, its own finished chunks included."""
    since_s: float
    """When it began to wait (the rank's own clock)."""
    work_s: float
    """Predicted time of what is left, beside others; least goes first."""
    weight: float
    """Cost of a second of its waiting: one over the root of the time that it took alone when it came, so between a
    mean of TTFTs and a mean of slowdowns."""
    long: bool
    """It takes more than a step's fixed time."""
    started: bool = False
    """In progress: it has run a chunk."""

    @classmethod
    def of(cls, cost: GroupCost, new: int, history: int, since_s: float, chunk: int) -> Prompt:
        """A request that comes. ``chunk``: tokens of a step, at most."""
        work = cost.work_s(new, history)
        return cls(new, history, since_s, work, cost.lone_s(new, history, chunk) ** -0.5, work > cost.step_s)

    def after(self, cost: GroupCost, tokens: int) -> Prompt:
        """Prompt that is left once so many of its tokens have run."""
        left, history = self.tokens - tokens, self.history + tokens
        work = cost.work_s(left, history)
        return self._replace(tokens=left, history=history, work_s=work, long=work > cost.step_s, started=True)
