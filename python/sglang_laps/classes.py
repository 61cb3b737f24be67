"""Classes of waiting requests, by the tokens that are not in the prefix cache, looked up again as the cache fills."""

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
from laps_core.policy.queues import DualQueue, Views, split
from laps_core.receipts.quoter import Quoted
from laps_core.receipts.run import Run

from sglang_laps import deadlines

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

RELOOK = 4
"""Most waiting long requests that a call of ``views`` matches against the prefix cache again, each at most once after a
batch: the tokens that the batch computed can have made a long request short."""


@dataclass(slots=True)
class Tag:
    """LAPS's data of a request, stored on the request. Times are those of ``time.perf_counter``."""

    since: float
    """Time when the request was first seen waiting."""
    arrival: float
    """Time when the request reached its scheduler."""
    slo_s: float | None = None
    """Deadline for the first token, in seconds after arrival. The default is that of the class when first seen."""
    new_tokens: int = 0
    """Tokens to prefill at the last lookup in the prefix cache."""
    history: int = 0
    """Cached tokens at that lookup."""
    at_least: int = 0
    """Least number of tokens that count for the class."""
    chunk_s: float = 0.0
    """Time when the last chunk was built; valid only for a prompt in progress."""
    looked: int = -1
    """Number of batches built before the last lookup in the prefix cache; -1 until the first one is over."""
    prompt: Prompt | None = None
    """The prompt as a group of data-parallel ranks last saw it."""
    runs: list[Run] = field(default_factory=list)
    """Batches with this request, if receipts are kept."""
    quoted: Quoted | None = None
    """Time to first token that was predicted on arrival."""

    @property
    def deadline_s(self) -> float | None:
        """Return the time when the first token is due at the scheduler; None = no deadline."""
        return due_s(self.arrival, self.slo_s)


class Classes:
    """Two views, short and long, of the one list of waiting requests."""

    def __init__(
        self, config: LapsConfig, threshold: int, cached: Callable[[Any], int], clock: Callable[[], float]
    ) -> None:
        """`threshold`: longest short request at the start (tokens). `cached`: looks a request up in the prefix cache
        and returns the tokens found. `clock`: returns seconds."""
        self._config = config
        self._cached, self._clock = cached, clock
        self._dual: DualQueue[Req] = DualQueue()
        self.threshold = threshold
        self.lengths = LengthCount()
        """Lengths of all requests, each as first seen."""
        self.batches = 0
        """Batches built so far. A lookup in the prefix cache is out of date if this has grown since."""
        self.new_shorts = 0
        """Short requests seen for the first time since a caller last set this to 0."""
        self.watch: Callable[[Req, Tag, ClassName], None] | None = None
        """Callback after each lookup of a request in the prefix cache: the first one and later ones."""

    def class_of(self, req: Req) -> ClassName:
        """Return the class of a request. Tag the request if it is seen for the first time."""
        tag: Tag | None = getattr(req, "laps_tag", None)
        if tag is None:
            now = self._clock()
            tag = req.laps_tag = Tag(now, deadlines.arrival(req, now))
            self._look(req, tag)
            # A retracted request has already had its first token.
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
        tag.new_tokens, tag.at_least = req.seqlen - tag.history, 0
        if self.watch is not None:
            self.watch(req, tag, self._class(tag))
        tag.looked = self.batches

    def views(self, queue: list[Req]) -> Views[Req]:
        """Return a read-only view of the waiting requests of each class."""
        views = self._dual.views(queue, self.class_of)
        if self._config.length_basis == "prompt":
            return views
        changed = False
        for tag, req in islice(((r.laps_tag, r) for r in views.long if r.laps_tag.looked != self.batches), RELOOK):
            self._look(req, tag)
            changed |= self._class(tag) == SHORT
        if changed:
            self._dual.forget()
            return self._dual.views(queue, self.class_of)
        return views

    def use_threshold(self, tokens: int) -> None:
        """Set the length of the longest short request; 0 = no change."""
        if tokens and tokens != self.threshold:
            self.threshold = tokens
            self._dual.forget()

    def outgrown(self, req: Req, left_tokens: int) -> bool:
        """Return True if a request that waited as short now has too many tokens left to prefill, because its prefix was
        evicted. The request then waits as long."""
        if left_tokens <= self.threshold:
            return False
        self.make_long(req, left_tokens)
        return True

    def make_long(self, req: Req, left_tokens: int) -> None:
        """Let a request with `left_tokens` tokens to prefill wait as long, at least until the next batch."""
        tag: Tag = req.laps_tag
        tag.new_tokens, tag.history = left_tokens, max(0, req.seqlen - left_tokens)
        tag.at_least, tag.looked = self.threshold + 1, self.batches
        self._dual.forget()

    def remove_batched(self, cls: ClassName, gone: set[int], left: Sequence[Req]) -> None:
        """Record that the requests with the ids in `gone` are in a batch; the requests `left` still wait."""
        self._dual.remove_batched(cls, gone, left)

    def seen(self, queue: list[Req], now: float) -> dict[str, list[Tag]]:
        """Return the tags of waiting requests by class, for the status, without changing anything. A request that no
        round has seen yet (the server may be paused) counts with all of its tokens."""

        def tag_of(req: Req) -> Tag:
            known: Tag | None = getattr(req, "laps_tag", None)
            arrival = deadlines.arrival(req, now)
            return known or Tag(arrival, arrival, new_tokens=req.seqlen)

        views = split(queue, lambda req: self._class(tag_of(req)))
        return {cls: list(map(tag_of, views.of(cls))) for cls in CLASSES}
