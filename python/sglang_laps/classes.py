"""Which of the waiting requests are short: by what the prefix cache leaves to compute, looked up again as it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from laps_core.config import LapsConfig
from laps_core.deadline import due_s
from laps_core.group.prompt import Prompt
from laps_core.histogram import LengthCount
from laps_core.length import CLASSES, SHORT, ClassName, classify, new_tokens
from laps_core.policy.queues import DualQueue, Views
from laps_core.receipts.ledger import Run
from laps_core.receipts.quoter import Quoted

from sglang_laps import deadlines

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

RELOOK = 4
"""Waiting long requests matched against the prefix cache again after each batch: what has been computed since may have
made them short."""


@dataclass(slots=True)
class Tag:
    """Data that LAPS keeps with a request, on the request itself. Times are those of ``time.perf_counter``."""

    since: float
    """When it was first seen waiting."""
    arrival: float
    """When it reached the server."""
    slo_s: float | None = None
    """The default is that of the class it had then."""
    new_tokens: int = 0
    """To prefill when last looked up."""
    history: int = 0
    """Cached tokens."""
    at_least: int = 0
    """Counts for its class as so many tokens or more."""
    chunk_s: float = 0.0
    """When its last chunk was built; read of a prompt in progress only."""
    looked: int = -1
    """Batch count at its last look into the prefix cache."""
    prompt: Prompt | None = None
    """The prompt as a group of data-parallel ranks last saw it."""
    runs: list[Run] = field(default_factory=list)
    """Batches that it is in, where receipts are kept."""
    quoted: Quoted | None = None
    """Time to first token that was predicted when it came."""

    @property
    def deadline_s(self) -> float | None:
        """When its first token is due at the scheduler."""
        return due_s(self.arrival, self.slo_s)


class Classes:
    """The two views over the one list of waiting requests."""

    def __init__(
        self, config: LapsConfig, threshold: int, cached: Callable[[Any], int], clock: Callable[[], float]
    ) -> None:
        """`threshold`: longest short request to start with (tokens). `cached`: looks a request up in the prefix cache
        (tokens found). `clock`: seconds."""
        self._config = config
        self._cached, self._clock = cached, clock
        self._dual: DualQueue[Req] = DualQueue()
        self.threshold = threshold
        self.lengths = LengthCount()
        """Lengths of all requests, each as it was when it was first seen."""
        self.batches = 0
        """Built so far: what a look into the prefix cache was before or after."""
        self.new_shorts = 0
        """Short requests seen for the first time since somebody set this to 0."""
        self.watch: Callable[[Req, Tag, ClassName], None] | None = None
        """Told of each request that was looked up in the prefix cache: when it comes, and again."""

    def of(self, req: Req) -> ClassName:
        """Return the class of a request; one seen for the first time is tagged."""
        tag: Tag | None = getattr(req, "laps_tag", None)
        if tag is None:
            now = self._clock()
            tag = req.laps_tag = Tag(now, deadlines.arrival(req, now))
            self._look(req, tag)
            # One that was retracted has had its first token.
            again = getattr(req, "retraction_count", 0)
            tag.slo_s = None if again else deadlines.slo_s(req, self._config, self._class(tag))
            self.lengths.add(max(1, req.seqlen - tag.history), tag.history)
            self.new_shorts += self._class(tag) == SHORT
        return self._class(tag)

    def _class(self, tag: Tag) -> ClassName:
        counted = new_tokens(tag.new_tokens + tag.history, tag.history, self._config.length_basis)
        return classify(max(tag.at_least, counted), self.threshold)

    def _look(self, req: Req, tag: Tag) -> None:
        tag.history = min(self._cached(req), req.seqlen - 1)
        tag.new_tokens, tag.at_least, tag.looked = req.seqlen - tag.history, 0, self.batches
        if self.watch is not None:
            self.watch(req, tag, self._class(tag))

    def views(self, queue: list[Req]) -> Views[Req]:
        """Return a view of the waiting requests of each class; read only."""
        views = self._dual.views(queue, self.of)
        if self._config.length_basis == "prompt":
            return views
        changed = False
        for tag, req in islice(((r.laps_tag, r) for r in views.long if r.laps_tag.looked != self.batches), RELOOK):
            self._look(req, tag)
            changed |= self._class(tag) == SHORT
        if changed:
            self._dual.forget()
            return self._dual.views(queue, self.of)
        return views

    def use_threshold(self, tokens: int) -> None:
        """From now on this is the longest short request; 0 = no change."""
        if tokens and tokens != self.threshold:
            self.threshold = tokens
            self._dual.forget()

    def outgrown(self, req: Req, left_tokens: int) -> bool:
        """Return True if a request that waited as short has more than that to prefill by now (its prefix was evicted);
        it then waits as long."""
        if left_tokens <= self.threshold:
            return False
        self.make_long(req, left_tokens)
        return True

    def make_long(self, req: Req, left_tokens: int) -> None:
        """Have a request with so much to prefill wait as long, at least until the next batch."""
        tag: Tag = req.laps_tag
        tag.new_tokens, tag.history = left_tokens, max(0, req.seqlen - left_tokens)
        tag.at_least, tag.looked = self.threshold + 1, self.batches
        self._dual.forget()

    def took(self, cls: ClassName, gone: set[int], left: Sequence[Req]) -> None:
        """Requests with these ids were batched; `left` wait on."""
        self._dual.took(cls, gone, left)

    def seen(self, queue: list[Req], now: float) -> dict[str, list[Tag]]:
        """By class, for the status, which changes nothing: a request that no round has looked at yet (the server may be
        paused) counts in full."""

        def tag_of(req: Req) -> Tag:
            known: Tag | None = getattr(req, "laps_tag", None)
            arrival = deadlines.arrival(req, now)
            return known or Tag(arrival, arrival, new_tokens=req.seqlen)

        views = self._dual.peek(queue, lambda req: self._class(tag_of(req)))
        return {cls: list(map(tag_of, views.of(cls))) for cls in CLASSES}
