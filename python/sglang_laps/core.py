"""State of one scheduler under LAPS: waiting requests, prompts in progress, batches on the device.

This module uses a few fields of requests and of batches, and nothing else of SGLang. ``Scheduler.waiting_queue`` stays
the only list of waiting requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from laps_core.length import LONG, SHORT, ClassName
from laps_core.policy.decode import Decode
from laps_core.policy.pacer import Pacer
from laps_core.policy.queues import changes, without
from laps_core.policy.types import LOOKAHEAD, DecodeStep, Paused, Plan

from sglang_laps.chunked import Chunked, Req
from sglang_laps.classes import Classes
from sglang_laps.flights import Flight, Part, Queues, Totals, as_waiting
from sglang_laps.priority import Priority


class LapsCore:
    """Selection of the requests that SGLang's batch builder sees, and statistics. Times are seconds of one clock."""

    def __init__(
        self,
        pacer: Pacer,
        classes: Classes,
        *,
        unit: int = 1,
        page: int = 1,
        priority: Callable[[Req], int] | None = None,
        decode: Decode | None = None,
        now: float = 0.0,
    ) -> None:
        """Start without requests. `unit`: a cut prompt ends on a multiple of this (tokens). `page`: KV page size
        (tokens). `priority`: of a request, smaller first; None = no priorities. `decode`: None = only prefill."""
        self.pacer, self.classes, self.decode = pacer, classes, decode
        self.totals = {SHORT: Totals(), LONG: Totals()}
        self.started_s = now
        self.abandoned = 0
        """Batches that ended in a pause because all of their requests were aborted."""
        self.chunked = Chunked()
        self.under_way: list[Flight] = []
        """Batches that run in slices; the last in the list runs now."""
        self.lacking = False
        """True if the first long prompt found too little memory, or no free row, at the last try."""
        self.considered = True
        """False if SGLang's builder has looked at no request of the last part: no request may start now."""
        self.asks_again = False
        """True if a short batch is held back, or other long prompts must be tried: the next round must not wait."""
        self.decodes = False
        """True if the plan asks for a decode step: first, as rows of the next batch, or alone if no batch is built."""
        self._next: Flight | None = None
        self._not_ready: list[Req] = []
        """Long prompts that the builder has skipped since the last batch although memory was free: their KV from the
        storage, or their adapter, is still loading."""
        self.unit, self.page, self._priority = unit, page, Priority(priority)
        self._flights: dict[int, Flight] = {}

    # -- decisions

    @property
    def in_flight(self) -> list[Flight]:
        """Return the batches whose results are not processed yet, without paused batches."""
        return list(self._flights.values())

    @property
    def step(self) -> DecodeStep | None:
        """Return the decode step on the device that is not part of a prefill batch, if any."""
        return None if self.decode is None else self.decode.running

    @property
    def rows_under_way(self) -> int:
        """Return the number of streams that have a row in a paused batch."""
        return sum(f.rows for f in self.under_way)

    def view_queues(self, queue: list[Req], slot: Req | None) -> Queues:
        """Return the requests that the next plan can pick from; `slot`: the prompt in the slot."""
        below = {id(f.cut) for f in self.under_way}
        begun = [r for r in self.chunked.in_progress(slot).reqs if id(r) not in below]
        views = self.classes.views(queue)
        long = self._priority.sort(views.long)
        if self._not_ready:
            passed_over = set(map(id, self._not_ready))
            long = [r for r in long if id(r) not in passed_over] or long
        return Queues(self._priority.sort(views.short), [*begun, *long[:LOOKAHEAD]], begun)

    def decide(
        self, now: float, queues: Queues, paused: Paused | None, *, frees_memory: bool, sent: Sequence[Req] = ()
    ) -> Plan:
        """Return the plan for the next batch; for the leading rank only. `frees_memory`: work is under way that will
        free memory. `sent`: finished prompts whose KV is being transferred."""
        short, long, begun = queues
        running, step = self._running() if paused is None else ([], None)
        self.pacer.record_arrivals(now, self.classes.new_shorts, busy=bool(running or step))
        shorts = [as_waiting(r, self._priority.of(r)) for r in short[:LOOKAHEAD]]
        longs = [as_waiting(r, self._priority.of(r), begun=i < len(begun)) for i, r in enumerate(long)]
        urgent = self._priority.urgent(short, long, paused)
        plan = self.pacer.plan(
            now, shorts, longs, urgent=urgent, paused=paused, lacking=self.lacking,
            drains=self._drains(frees_memory, sent) if self.lacking else None,
            free_s=self.pacer.free_s(now, running, step),
        )  # fmt: skip
        if self.decode is None:
            return plan
        # The overlap loop decides while a batch runs: the next batch starts when that one ends.
        begins_s = now if paused is not None else self.pacer.free_s(now, self.in_flight, self.step)
        apart, rate = urgent is not None or self.lacking, self.pacer.short_rate.per_s(now)
        return self.decode.adjust_plan(begins_s, plan, shorts, longs, paused, self.pacer.sizes, apart=apart, per_s=rate)

    def _drains(self, frees_memory: bool, sent: Sequence[Req]) -> ClassName | None:
        """Return the class of the work that will free memory, long before short; None if no work will."""
        flights = (*self.in_flight, *self.under_way)
        if self.chunked.parked or any(flight.cls == LONG for flight in flights):
            return LONG
        if any(r.laps_tag is not None and self.classes.class_of(r) == LONG for r in sent):
            return LONG
        return SHORT if frees_memory or flights else None

    def apply_plan(self, plan: Plan) -> None:
        """Apply the plan, which is the same on every rank, to this round."""
        self.asks_again, self.decodes = plan.held == "window", bool(plan.decode)
        self.classes.use_threshold(plan.threshold)

    def record_empty_queue(self, now: float) -> None:
        """Record a round without work and without a paused batch."""
        self.pacer.record_arrivals(now, 0, busy=any(self._running()))
        self.pacer.record_empty_queue()

    def _running(self) -> tuple[list[Flight], DecodeStep | None]:
        """Return the batches and the decode step that run while the next batch is decided: at most one. Empty unless
        decisions are put off, because only then launches are timed."""
        return (self.in_flight, self.step) if self.pacer.sizes.lead_s else ([], None)

    def look(self, now: float, queue: list[Req]) -> float:
        """Look at the waiting requests while a step runs. Return the time until which the next decision is put off."""
        self.classes.views(queue)
        shorts, self.classes.new_shorts = self.classes.new_shorts, 0
        self.pacer.record_arrivals(now, shorts, busy=True)
        return self.pacer.decision_time_s(now, self.in_flight, self.step)

    def paused(self, flight: Flight, layers_left: float, layers: int) -> Paused:
        """Return the state of `flight` in a pause, with `layers_left` of its `layers` still to run."""
        whole_s = self.pacer.model.predict(flight.shape)
        seen = [as_waiting(r, self._priority.of(r)) for f in self.under_way for r in f.reqs]
        first = min((w.priority for w in seen), default=0)
        dues = tuple(w.deadline_s for w in seen if w.deadline_s is not None)
        left_s = float("inf") if whole_s is None else whole_s * layers_left / layers
        slice_s = 0.0 if whole_s is None else whole_s * flight.layers / (layers * flight.parts)
        weight = self.pacer.sizes.weight(seen)
        return Paused(left_s, len(self.under_way), first, weight, dues, slice_s, self.rows_under_way > 0)

    # -- what the batch builder is shown

    def parts(self, plan: Plan, queues: Queues, *, beside: bool) -> Iterator[Part]:
        """Yield the parts to show the builder, each next one if no batch was built from the part before.

        `beside`: a batch is paused. Then a part holds only picked requests, because the builder would fill a whole
        chunk, and no prompt in progress is tried alone, because it would be cut.
        """
        for cls in plan.order:
            carries = plan.decode == "carried" and plan.order[0] == cls
            if cls == SHORT:
                picked, seen = [queues.short[i] for i in plan.picked], set(plan.picked)
                rest = [r for i, r in enumerate(queues.short[:LOOKAHEAD]) if i not in seen] + queues.short[LOOKAHEAD:]
                yield Part(SHORT, picked if beside or plan.split else picked + rest, carries=carries)
                continue
            self.lacking = self.lacking and not plan.long.picked
            picked = [queues.long[i] for i in plan.long.picked]
            first = next((r for r in picked if r in queues.begun), None)
            joining = [queues.short[i] for i in plan.picked] if plan.mixed else []
            queue = [*joining, *(r for r in picked if r is not first)]
            yield Part(LONG, queue, first, plan.long.tokens, whole=beside, carries=carries)
            if self.considered:
                self._record_skipped([r for r in picked if r is not first], queues)
            elif first is None and picked and not beside:
                # No row is free (--max-running-requests). Short requests would take each row that becomes free.
                self.lacking = True
            # Memory is reserved for a prompt in progress, so it can go on even if another prompt cannot start.
            for req in queues.begun if not beside else ():
                if req is not first:
                    yield Part(LONG, [], req, plan.long.tokens, whole=False)

    def _record_skipped(self, picked: list[Req], queues: Queues) -> None:
        """Skip the picked prompts, of which the builder made no batch, until a batch runs or all prompts were tried."""
        if self.lacking:
            # Perhaps no batch can run before one of the skipped prompts does.
            self._not_ready = []
        elif picked:
            # Then the overlap loop asks again at once, and not only when a request arrives or a batch ends.
            self.asks_again = len(queues.long) - len(queues.begun) > len(picked)
            self._not_ready = [*self._not_ready, *picked] if self.asks_again else []

    def reserve(self, part: Part, slot: Req | None) -> int:
        """Return the KV tokens that prompts in progress outside this part need to go on."""
        others = [r for r in self.chunked.in_progress(slot).reqs if r is not part.slot]
        return sum(len(r.full_untruncated_fill_ids) - (r.extend_end or 0) + self.page for r in others)

    def remove_batched(self, part: Part, waiting: list[Req], left: list[Req]) -> list[Req]:
        """Return all waiting requests after the builder was shown `part` and has `left` some of its requests."""
        gone, added = changes(part.queue, left)
        if gone:
            waiting = without(waiting, gone)
            self.classes.remove_batched(part.cls, gone, waiting)
        return waiting + added if added else waiting

    # -- batches

    def record_build(self, part: Part, batch: Any, plan: Plan, cut: Req | None, begun: list[Req], now: float) -> Flight:
        """Record the batch that was built from `part`; return its flight. `cut` goes on afterwards and has the slot.
        `begun`: as in Queues."""
        rows = len(batch.decoding_reqs or ()) if part.carries else 0
        reqs = batch.reqs[: len(batch.reqs) - rows]
        if not part.whole:
            # Prompts in progress that are not in the batch are parked.
            self.chunked.record_build([r for r in begun if r is not part.slot and r is not cut], cut)
        self.classes.batches += 1
        self._not_ready = []
        short: Collection[int] = range(len(reqs)) if part.cls == SHORT else ()
        if part.cls == LONG and plan.mixed:
            short = {i for i, r in enumerate(reqs) if r is not cut and self.classes.class_of(r) == SHORT}
        cls = SHORT if len(short) == len(reqs) else LONG
        # True: short requests took the last rows of a step that was planned for long prompts.
        self.lacking |= bool(plan.long.picked) and part.cls == LONG and cls == SHORT and part.slot is None
        if cut is not None:
            cut.laps_tag.chunk_s = now
        self._next = Flight(
            cls=cls,
            shape=list(zip(batch.extend_lens, batch.prefix_lens, strict=True)),
            short=short,
            within=bool(self.under_way),
            batch=batch,
            reqs=reqs,
            cut=cut,
            layers=plan.long.layers if cls == LONG else 0,
            parts=plan.long.parts,
            rows_s=self.decode.rows_s(self.pacer.sizes) if rows and self.decode is not None else 0.0,
        )
        self.pacer.record_launch(now, self._next, plan)
        return self._next

    def idle(self, batch: Any) -> Flight:
        """Return the flight of a joint step in which this rank has nothing to compute."""
        return Flight(cls=SHORT, shape=[], within=bool(self.under_way), batch=batch, reqs=[], cut=None, stock=False)

    def take_next(self) -> Flight | None:
        """Take the batch that was built last, before its launch; None if it was taken already."""
        flight, self._next = self._next, None
        return flight

    def record_launch(self, batch: Any, flight: Flight) -> None:
        """Record a launched batch. Its result comes with that batch or a copy, which has the same ``forward_iter``."""
        self._flights[batch.forward_iter] = flight
        if flight.rows and self.decode is not None:
            self.decode.record_launch()

    def flight_of(self, batch: Any) -> Flight | None:
        """Remove and return the flight of this batch; None if the batch has no flight."""
        return self._flights.pop(batch.forward_iter, None)

    def record_result(self, flight: Flight, now: float) -> None:
        """Record that the result of a flight is processed."""
        below = self.under_way[-1] if self.under_way else None
        took_s = flight.lasted_s = self.pacer.record_result(flight, below, now)
        self.abandoned += flight.abandoned
        if flight.rows and self.decode is not None:
            end = flight.done or now
            self.decode.record_step(end - took_s, end, streams=flight.rows, within=flight.within, rows_s=flight.rows_s)
        for (cls, req), (new, _) in zip(flight.served(), flight.shape, strict=False):
            # A request that was retracted before its result was processed has no answer, and waits again.
            if req is not flight.cut and req.laps_tag is not None:
                self.pacer.slo.record(now, cls, now - req.laps_tag.arrival, req.laps_tag.slo_s)
            self.totals[cls].requests += 1
            self.totals[cls].tokens += new
        # The device time of an abandoned batch counts, its requests do not.
        if flight.reqs or flight.abandoned:
            self.totals[flight.cls].batches += 1
            self.totals[flight.cls].busy_s += took_s

    def record_decode_step(self, begin: float, end: float, *, streams: int, within: bool, beside: bool = False) -> None:
        """Record a decode step that occupied the device. `within`: in a pause of the batch that was paused last.
        `beside`: other ranks prefilled in the same step."""
        if self.decode is None:
            return
        self.decode.record_step(begin, end, streams=streams, within=within, rows_s=0.0 if beside else None)
        if not beside:
            self.pacer.record_decode_step(begin, end, self.under_way[-1] if within and self.under_way else None)

    @contextmanager
    def slicing(self, flight: Flight) -> Iterator[None]:
        """List `flight` as a batch that runs in slices while the context lasts."""
        self.under_way.append(flight)
        try:
            yield
        finally:
            self.under_way.remove(flight)
