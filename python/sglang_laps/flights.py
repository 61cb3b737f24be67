"""Parts of a queue that one scheduler's batch builder is shown, and the batches that it has made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from laps_core.length import LONG, SHORT, ClassName
from laps_core.policy.types import Running, Waiting
from laps_core.receipts.ledger import Run

from sglang_laps.chunked import Req
from sglang_laps.classes import Tag


class Lines(NamedTuple):
    """Requests that wait in one round."""

    short: list[Req]
    long: list[Req]
    """Prompts in progress, then those that wait: what the plan may pick from."""
    begun: list[Req]
    """Prompts between two of their chunks, the one in the slot first; not those that a paused batch has cut."""


@dataclass(slots=True)
class Part:
    """Requests that the batch builder is shown."""

    cls: ClassName
    queue: list[Req]
    """Waiting requests."""
    slot: Req | None = None
    """A prompt in progress."""
    tokens: int = 0
    """New tokens of a long batch; 0 = what the server's chunk holds."""
    whole: bool = True
    """Nothing may be cut."""
    carries: bool = False
    """The batch has a row of each stream."""

    def limit(self, unit: int, page: int) -> int | None:
        """Return the most new tokens of the prompt in progress, the only one that is cut: what the requests before it
        leave, if they all run whole; None = any. `unit`, `page`: see LapsCore."""
        left = self.tokens - sum(-(-r.laps_tag.new_tokens // page) * page for r in self.queue)
        return left // unit * unit if self.slot is not None and left >= unit else None


@dataclass(slots=True, kw_only=True)
class Flight(Running):
    """A batch on the device."""

    batch: Any
    reqs: list[Req]
    """Requests whose prompts are prefilled."""
    cut: Req | None
    """The prompt that goes on after it."""
    layers: int = 0
    """Layers of a slice; 0 = the pass runs in one piece."""
    parts: int = 1
    """Slices of a layer."""
    lasted_s: float = 0.0
    """Device time that it had, once its result is processed."""
    abandoned: bool = False
    """True if the pass ended in a pause, as all of its requests were aborted."""
    round: int = 0
    """Round of a group of data-parallel ranks in which it was built."""
    marks: tuple[Any, Any] = (None, None)
    """Begin and end of the pass on the device, where the host does not see them."""
    run: Run | None = None
    """The same for receipts, where they are kept."""

    @property
    def rows(self) -> int:
        """Streams that have a row in it, after ``reqs``."""
        return len(self.shape) - len(self.reqs)

    def served(self) -> list[tuple[ClassName, Req]]:
        """Return the requests whose prompts it has prefilled, each with its class."""
        return [] if self.abandoned else [(SHORT if i in self.short else LONG, r) for i, r in enumerate(self.reqs)]

    def totals(self) -> dict[ClassName, Totals]:
        """Return what it has done for each class; call it once its result is processed."""
        done = {self.cls: Totals()} if self.abandoned else dict[ClassName, Totals]()
        for (cls, _), (new, _) in zip(self.served(), self.shape, strict=False):
            done.setdefault(cls, Totals()).add(Totals(0, 1, new, 0.0))
        if self.cls in done:
            done[self.cls].add(Totals(1, 0, 0, self.lasted_s))
        return done


@dataclass(slots=True)
class Totals:
    """Since-start counters of one class; each is a key of the status and a series (``status._COUNTERS``)."""

    batches: int = 0
    requests: int = 0
    tokens: int = 0
    busy_s: float = 0.0

    def add(self, other: Totals) -> None:
        """Add up."""
        self.batches += other.batches
        self.requests += other.requests
        self.tokens += other.tokens
        self.busy_s += other.busy_s


def as_waiting(req: Req, priority: int = 0, *, begun: bool = False) -> Waiting:
    """Return a request as the rules see it. `begun`: it is between two of its chunks."""
    tag: Tag = req.laps_tag
    if not begun:
        return Waiting(tag.new_tokens, tag.history, tag.since, tag.deadline_s, tag.new_tokens, False, priority)
    done = max(req.prefix_len, req.extend_end or 0)
    return Waiting(req.seqlen - done, done, tag.since, tag.deadline_s, tag.new_tokens, True, priority)
