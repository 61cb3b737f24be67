"""Quoted times to first token of one scheduler: a quote for each request that enters the queue, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from laps_core.config import LapsConfig
from laps_core.length import CLASSES, SHORT, ClassName
from laps_core.policy.pacer import Pacer
from laps_core.protocol import Lengths
from laps_core.receipts.quote import Quote, QuoteState, quote
from laps_core.receipts.quoter import Device, Quoter
from msgspec import to_builtins
from sglang.srt.disaggregation.utils import is_aborted

from sglang_laps import deadlines
from sglang_laps.chunked import Req
from sglang_laps.classes import Classes, Tag
from sglang_laps.core import LapsCore
from sglang_laps.flights import Flight, Queues


class QuotedCore(LapsCore):
    """Quotes each new request; for the leading rank. The cost of an event does not depend on how many requests wait."""

    def __init__(
        self,
        config: LapsConfig,
        pacer: Pacer,
        classes: Classes,
        *,
        guaranteed: bool,
        clock: Callable[[], float] = time.perf_counter,
        **how: Any,
    ) -> None:
        """`guaranteed`: see ``Quoter``. `how`: arguments of ``LapsCore``."""
        super().__init__(pacer, classes, now=clock(), **how)
        self.quoter = Quoter(config, pacer, clock(), guaranteed=guaranteed and self.decode is None)
        self._clock, self._config = clock, config
        classes.watch = self._looked

    def view_queues(self, queue: list[Req], slot: Req | None) -> Queues:
        found = super().view_queues(queue, slot)
        begun = self.chunked.in_progress(slot).reqs
        if len(self.quoter.backlog) > len(queue) + len(begun):
            # Some requests were aborted.
            self.quoter.backlog.remove_except({r.rid for r in (*queue, *begun)})
        return found

    def record_build(self, *how: Any, **more: Any) -> Flight:
        flight = super().record_build(*how, **more)
        cut = flight.cut
        for req, (new, old) in zip(flight.reqs, flight.shape, strict=False):
            left = 0 if cut is None or req is not cut else cut.seqlen - new - old
            self.quoter.record_launch(req.rid, left, new + old)
        return flight

    def record_result(self, flight: Flight, now: float) -> None:
        super().record_result(flight, now)
        self.quoter.record_batch(flight.cls, flight.lasted_s)
        for _, req in flight.served():
            tag: Tag | None = req.laps_tag
            if req is not flight.cut and tag is not None and tag.quoted is not None and not is_aborted(req):
                self.quoter.record_outcome(now, tag.quoted)

    def quotes(self, now: float) -> dict[str, Any]:
        """Return two entries of /laps_status (JSON-ready). ``quote``: the state from which a reader computes quotes.
        ``quotes``, for people: present quotes of a median request of each class, and the outcomes of quotes so far."""
        state = self.quoter.state(now, self._device(now), whole=True)
        quotes = {
            "typical": {} if state is None else typical(state, self.classes.lengths.to_lengths(now)),
            "outcomes": {cls: dict(sides) for cls, sides in self.quoter.counts.items()},
            "beyond_bound": self.quoter.beyond_bound,
        }
        return {"quote": None if state is None else to_builtins(state), "quotes": quotes}

    def _looked(self, req: Req, tag: Tag, cls: ClassName) -> None:
        """Quote a new request, or update a request of which more tokens were found in the prefix cache."""
        # A retracted request, which already had its first token, is no new arrival. Nor is one that came before the
        # model was fitted: it has waited in the queue, not before.
        if tag.looked >= 0 or getattr(req, "retraction_count", 0) > 0:
            self.quoter.update_waiting(req.rid, cls, tag.new_tokens, tag.history)
            return
        now = self._clock()
        waited_s, due = max(0.0, now - tag.arrival), deadlines.slo_s(req, self._config, cls) is not None
        tag.quoted = self.quoter.quote_arrival(
            now, req.rid, tag.new_tokens, tag.history, cls, self._device(now), waited_s=waited_s, due=due
        )

    def _device(self, now: float) -> Device:
        left = []
        for flight in self.under_way:
            spent_s = 0.0 if flight.started is None else now - flight.started - flight.paused_s
            left.append(max(0.0, (self.pacer.model.predict(flight.shape) or 0.0) - spent_s))
        running, step = self.in_flight, self.step
        return Device(self.pacer.free_s(now, running, step) - now if running or step else 0.0, tuple(left))


def typical(state: QuoteState, lengths: Lengths) -> dict[ClassName, Any]:
    """Return the quote of the median request so far of each class that had requests (JSON-ready)."""
    found: dict[ClassName, Quote] = {}
    for cls in CLASSES:
        own = [b for b in lengths.buckets if (b.new_tokens <= state.threshold * b.requests) == (cls == SHORT)]
        left = sum(b.requests for b in own) / 2
        for b in own:
            left -= b.requests
            if left <= 0:
                found[cls] = quote(state, max(1, b.new_tokens // b.requests), b.cached_tokens // b.requests)
                break
    return {cls: to_builtins(q) for cls, q in found.items()}


def states(status: dict[str, Any]) -> Sequence[dict[str, Any] | None]:
    """Return the quote state of each data-parallel rank in a status; None for a rank without a quote state."""
    return [rank.get("quote") for rank in status.get("ranks") or [status]]
