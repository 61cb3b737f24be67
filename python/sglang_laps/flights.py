"""Parts of the queue that one scheduler's batch builder is shown, and the batches built from these parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from laps_core.length import LONG, SHORT, ClassName, whole_units
from laps_core.policy.types import Running, Waiting
from laps_core.receipts.run import Run

from sglang_laps.chunked import Req
from sglang_laps.classes import Tag


class Queues(NamedTuple):
    """Waiting requests of one round."""

    short: list[Req]
    long: list[Req]
    """Prompts in progress, then waiting long prompts: the list that the plan picks from."""
    begun: list[Req]
    """Prompts between two of their chunks, the prompt in the slot first; without prompts cut by a paused batch."""


@dataclass(slots=True)
class Part:
    """Requests that the batch builder is shown."""

    cls: ClassName
    queue: list[Req]
    """Waiting requests."""
    slot: Req | None = None
    """Prompt in progress, if the part has one."""
    tokens: int = 0
    """New tokens of a long batch; 0 = as many as the server's chunk holds."""
    whole: bool = True
    """True if no request may be cut."""
    carries: bool = False
    """True if the batch carries a row of each stream."""

    def limit(self, unit: int, page: int) -> int | None:
        """Return the most new tokens of the prompt in progress, the only request that is cut: the tokens left when all
        queued requests run whole; None = no limit. `unit`, `page`: see LapsCore."""
        left = self.tokens - sum(whole_units(r.laps_tag.new_tokens, page) for r in self.queue)
        return left // unit * unit if self.slot is not None and left >= unit else None


@dataclass(slots=True, kw_only=True)
class Flight(Running):
    """A batch on the device."""

    batch: Any
    reqs: list[Req]
    """Requests whose prompts are prefilled, without rows of streams."""
    cut: Req | None
    """Prompt that goes on after this batch."""
    layers: int = 0
    """Layers per slice; 0 = the pass runs whole."""
    parts: int = 1
    """Slices per layer, if one layer takes longer than a slice should."""
    lasted_s: float = 0.0
    """Device time of the batch (seconds), known once its result is processed."""
    abandoned: bool = False
    """True if the pass ended in a pause because all of its requests were aborted."""
    round: int = 0
    """Round of the group of data-parallel ranks in which the batch was built."""
    marks: tuple[Any, Any] = (None, None)
    """Device events at the start and the end of the pass, if the host cannot see these times."""
    run: Run | None = None
    """Record of the batch for receipts, if receipts are kept."""

    @property
    def rows(self) -> int:
        """Return the number of streams that have a row in the batch, after ``reqs``."""
        return len(self.shape) - len(self.reqs)

    def row_ended(self) -> bool:
        """Return True if one of these streams has ended: the result before this batch was its last."""
        return any(r.finished() for r in self.batch.reqs[len(self.reqs) :])

    def served(self) -> list[tuple[ClassName, Req]]:
        """Return the requests whose prompts the batch has prefilled, each with its class."""
        return [] if self.abandoned else [(SHORT if i in self.short else LONG, r) for i, r in enumerate(self.reqs)]


@dataclass(slots=True)
class Totals:
    """Counters of one class since start; each is a key of the status and a series (``status._COUNTERS``)."""

    batches: int = 0
    requests: int = 0
    tokens: int = 0
    busy_s: float = 0.0


def as_waiting(req: Req, priority: int = 0, *, begun: bool = False) -> Waiting:
    """Return a request in the form that the policy reads. `begun`: the request is between two of its chunks."""
    tag: Tag = req.laps_tag
    if not begun:
        return Waiting(tag.new_tokens, tag.history, tag.since, tag.deadline_s, tag.new_tokens, False, priority)
    done = max(req.prefix_len, req.extend_end or 0)
    return Waiting(req.seqlen - done, done, tag.since, tag.deadline_s, tag.new_tokens, True, priority)
