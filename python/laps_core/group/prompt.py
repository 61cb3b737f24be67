"""A request that waits on a rank, as the joint plan sees it."""

from __future__ import annotations

from typing import NamedTuple

from laps_core.group.cost import GroupCost


class Prompt(NamedTuple):
    """A request, or a prompt between two of its chunks. Use ``after`` once a chunk has run."""

    tokens: int
    """New tokens left."""
    history: int
    """Tokens in the cache, its own finished chunks included."""
    since_s: float
    """Start of the wait (the rank's own clock)."""
    work_s: float
    """Predicted time of the remaining tokens in a step with others; least goes first."""
    weight: float
    """Cost of a second of waiting: one over the root of the request's time alone on arrival; between a mean of TTFTs
    and a mean of slowdowns."""
    long: bool
    """True if the prompt takes more than a step's fixed time."""
    started: bool = False
    """True once a chunk has run."""

    @classmethod
    def of(cls, cost: GroupCost, new: int, history: int, since_s: float, chunk: int) -> Prompt:
        """Return the prompt of an arriving request. ``chunk``: most tokens of a step."""
        work = cost.work_s(new, history)
        return cls(new, history, since_s, work, cost.lone_s(new, history, chunk) ** -0.5, work > cost.step_s)

    def after(self, cost: GroupCost, tokens: int) -> Prompt:
        """Return the rest of the prompt once ``tokens`` of it have run."""
        left, history = self.tokens - tokens, self.history + tokens
        work = cost.work_s(left, history)
        return self._replace(tokens=left, history=history, work_s=work, long=work > cost.step_s, started=True)
