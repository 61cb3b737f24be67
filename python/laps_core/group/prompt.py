"""Request that waits on a rank, as the joint plan sees it."""

from __future__ import annotations

from typing import NamedTuple

from laps_core.group.cost import GroupCost


class Prompt(NamedTuple):
    """Waiting request, or prompt between two of its chunks. Call ``after`` when a chunk has run."""

    tokens: int
    """New tokens left."""
    history: int
    """Tokens in the cache, including the prompt's own finished chunks."""
    since_s: float
    """Start of the wait (the rank's own clock)."""
    work_s: float
    """Predicted time of the remaining tokens in a step with other requests; the prompt with the least goes first."""
    weight: float
    """Cost of a second of waiting: 1 / sqrt(time of the request alone, on arrival). A compromise between minimizing the
    mean TTFT (equal weights) and the mean slowdown (1 / time alone)."""
    long: bool
    """True if the prompt takes more than a step's fixed time."""
    started: bool = False
    """True once a chunk has run."""

    @classmethod
    def of(cls, cost: GroupCost, new: int, history: int, since_s: float, chunk: int) -> Prompt:
        """Return the prompt of an arriving request. ``chunk``: most new tokens of a rank's batch."""
        work = cost.work_s(new, history)
        return cls(new, history, since_s, work, cost.lone_s(new, history, chunk) ** -0.5, work > cost.step_s)

    def after(self, cost: GroupCost, tokens: int) -> Prompt:
        """Return the rest of the prompt once ``tokens`` of it have run."""
        left, history = self.tokens - tokens, self.history + tokens
        work = cost.work_s(left, history)
        return self._replace(tokens=left, history=history, work_s=work, long=work > cost.step_s, started=True)
