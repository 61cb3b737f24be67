"""The glue between ``laps_core`` and SGLang's prefill scheduler.

``Scheduler.waiting_queue`` stays the only list of waiting requests. ``Scheduler.chunked_req`` holds the prompt whose
chunk ran last; others in progress are parked beside it. Around each call of the stock batch builder the mixin shows it
what the plan picked; whatever happens in there, all is whole again afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from laps_core.config import AUTO, ConfigError, LapsConfig
from laps_core.length import LONG, SHORT, LengthClass, unit_of, usable_threshold
from laps_core.scheduling.pacer import Pacer
from laps_core.scheduling.plan import LOOKAHEAD, Plan, Running
from laps_core.scheduling.queues import Views, changes, without
from laps_core.scheduling.waiting import Waiting
from sglang.srt.disaggregation.utils import DisaggregationMode, is_aborted
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.runtime_context import get_parallel, get_serving

from sglang_laps import graphs, slices
from sglang_laps.adder import LapsPrefillAdder, ShortPrefillAdder, WholePrefillAdder
from sglang_laps.classes import Classes, Tag, waiting
from sglang_laps.flights import Books, Flight
from sglang_laps.interlude import Interlude
from sglang_laps.snapshot import snapshot
from sglang_laps.status import Series
from sglang_laps.support import off_reason, refuse, resolved

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler as Stock
else:
    Stock = object  # the class it is mixed into, see scheduler_class

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Shown:
    """What the batch builder made of what it was shown."""

    cut: Req | None = None
    """The prompt that goes on after the batch."""


class LapsPrefillMixin(Stock):  # type: ignore[misc]
    """Length-aware prefill scheduling, mixed in before SGLang's Scheduler."""

    laps_config: LapsConfig
    waiting_queue: list[Req]
    chunked_req: Req | None
    chunked_prefill_size: int | None
    load_inquirer: Any
    laps_on = False
    """Off, every method here is SGLang's own, but for the status that says why."""
    _laps_waiting = False
    _laps_series: Series | None = None
    _laps_off_reason: str | None = None
    _laps_building: LengthClass | None = None
    _laps_adder: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adder = super().get_prefill_adder_class()
        reason = off_reason(resolved(self.server_args))
        if reason is None and adder is not PrefillAdder:
            reason = f"this scheduler builds its batches with {adder.__name__}, not PrefillAdder"
        if reason:
            logger.warning("LAPS scheduler is off: %s.", reason)
            self._laps_off_reason = reason
            return
        config = self.laps_config
        wanted = 256 if config.length_threshold == AUTO else int(config.length_threshold)
        threshold = usable_threshold(wanted, self._laps_chunk_budget(), self.page_size)
        if threshold < wanted:
            logger.warning(
                "LAPS: the length threshold is lowered from %d to %d tokens, what one chunk holds.",
                wanted,
                threshold,
            )
        runner = self.tp_worker.model_runner
        self._laps_whole = "slice_ms is 0" if config.slice_ms == 0.0 else slices.why_not(self)
        self._laps_slices = slices.Slices(runner) if self._laps_whole is None else None
        self._laps_unit = unit_of(self.page_size, self.truncation_align_size)
        try:
            self._laps_pacer = Pacer(
                config,
                threshold=threshold,
                chunk_tokens=self._laps_chunk_budget(),
                unit=self._laps_unit,
                layers=0 if self._laps_slices is None else self._laps_slices.layers,
            )
        except ConfigError as e:
            refuse(e)
        graphs.use_model(runner, self._laps_pacer.model.predict)
        self._laps_classes = Classes(config, threshold, self.tree_cache)
        # The builder counts the waiting tokens for its log line, but sees a part: counted after it (_laps_built).
        self.load_inquirer = replace(
            self.load_inquirer, get_waiting_queue=lambda: self.waiting_queue if self._laps_building is None else []
        )
        self._laps_parked: list[Req] = []
        self._laps_lacking = False
        self._laps_aborted: list[Req] = []
        self._laps_under_way: list[Flight] = []
        self._laps_flights: dict[int, Flight] = {}
        self._laps_next: Flight | None = None
        self._laps_chunk_unsent = False
        self._laps_synchronous = torch.device(self.device).type == "cpu"
        self._laps_leader = get_parallel().attn_tp_rank == 0
        self._laps_saves = first_of_all(get_parallel())
        self._laps_started = self._laps_shown = time.perf_counter()
        if self.metrics_reporter.enable_metrics and self._laps_leader:
            self._laps_series = Series(self._laps_labels())
        self._laps_books = Books(self._laps_pacer, self._laps_series, self._laps_started)
        self._laps_interlude = Interlude(self)
        self.laps_on = True

    def _laps_labels(self) -> dict[str, str]:
        return {"model_name": get_serving().served_model_name, "dp_rank": str(get_parallel().dp_rank or 0)}

    def _laps_chunk_budget(self) -> int | None:
        budgets = [b for b in (self.chunked_prefill_size, self.max_prefill_tokens) if b is not None and b > 0]
        return min(budgets) if self.chunked_prefill_size is not None else None

    # -- decisions

    def _laps_in_progress(self) -> list[Req]:
        """Prompts between two of their chunks, the one in the slot first; not those that a paused batch has cut."""
        below = {f.cut for f in self._laps_under_way}
        every = [r for r in (self.chunked_req, *self._laps_parked) if r is not None]
        return [r for r in every if r not in below]

    def _laps_plan(self, views: Views[Req], longs: Sequence[Req], running: Running | None) -> Plan:
        """One decision: the leading rank's, on every rank."""
        if not views.short and not longs and running is None:
            if self._laps_leader:
                self._laps_pacer.arrived(time.perf_counter(), 0)
                self._laps_pacer.nothing_waits()
            return Plan(())
        plan = self._laps_decide(views, longs, running) if self._laps_leader else Plan(())
        self._laps_classes.new_shorts = 0
        if get_parallel().attn_tp_size == 1:
            return plan
        box = torch.tensor(plan.numbers(), dtype=torch.int64)
        group = self.attn_tp_cpu_group
        torch.distributed.broadcast(box, src=torch.distributed.get_global_rank(group, 0), group=group)
        return plan if self._laps_leader else Plan.of(box.tolist())

    def _laps_decide(self, views: Views[Req], longs: Sequence[Req], running: Running | None) -> Plan:
        now = time.perf_counter()
        pacer = self._laps_pacer
        pacer.arrived(now, self._laps_classes.new_shorts)
        return pacer.plan(
            now,
            [waiting(r) for r in views.short[:LOOKAHEAD]],
            [self._laps_long(r) for r in longs],
            waiting=len(views.short) + len(longs),
            urgent=self._laps_urgent(views, longs) if views.short and longs else None,
            running=running,
            lacking=self._laps_lacking and self._laps_frees_memory(),
        )

    def _laps_frees_memory(self) -> bool:
        """Whether work is under way that will give memory back."""
        return bool(self._laps_flights or self._laps_under_way or self.disagg_prefill_inflight_queue)

    def _laps_long(self, req: Req) -> Waiting:
        tag: Tag = req.laps_tag
        rank = self.policy.priority_sign * (req.priority or 0) if self.enable_priority_scheduling else 0
        done = max(req.prefix_len, req.extend_end or 0)
        if req is self.chunked_req or req in self._laps_parked:
            return Waiting(req.seqlen - done, done, tag.since, tag.deadline_s, tag.new_tokens, True, rank)
        return Waiting(tag.new_tokens, tag.history, tag.since, tag.deadline_s, tag.new_tokens, False, rank)

    def _laps_urgent(self, views: Views[Req], longs: Sequence[Req]) -> LengthClass | None:
        """The class with the strictly higher priority under --enable-priority-scheduling."""
        if not self.enable_priority_scheduling:
            return None
        sign = self.policy.priority_sign
        short = min(sign * (r.priority or 0) for r in views.short)
        long = min(sign * (r.priority or 0) for r in longs)
        if short == long:
            return None
        return SHORT if short < long else LONG

    # -- one round

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        """Build the next batch of one class."""
        if not self.laps_on or self.disaggregation_mode != DisaggregationMode.PREFILL:
            return super().get_new_batch_prefill(running_batch)
        return self._laps_build(running_batch, None)

    def _laps_build(self, running_batch: ScheduleBatch, running: Running | None) -> NextBatchPlan:
        """Decide and build. `running`: what is paused meanwhile."""
        views = self._laps_classes.views(self.waiting_queue)
        longs = [*self._laps_in_progress(), *views.long[:LOOKAHEAD]]
        plan = self._laps_plan(views, longs, running)
        self._laps_waiting = plan.waiting
        self._laps_classes.use_threshold(plan.threshold)
        built = None
        for cls in plan.order:
            if cls is LONG:
                self._laps_lacking = False
            whole = cls is SHORT or running is not None
            for queue, slot in self._laps_tries(cls, views, longs, plan, beside=running is not None):
                with self._laps_only(cls, queue, slot, plan.tokens, whole=whole) as shown:
                    built = super().get_new_batch_prefill(running_batch)
                running_batch = built.running_batch
                if built.batch_to_run is None:
                    continue
                if not whole:
                    self._laps_hand_over(slot, shown.cut)
                self._laps_built(cls, built.batch_to_run, plan, shown.cut, within=running is not None)
                return built
        if built is None:
            # The builder also polls the grammar queue.
            with self._laps_only(SHORT, [], None, whole=True):
                built = super().get_new_batch_prefill(running_batch)
        return built

    def _laps_tries(
        self, cls: LengthClass, views: Views[Req], longs: Sequence[Req], plan: Plan, *, beside: bool
    ) -> Iterator[tuple[list[Req], Req | None]]:
        """What to show the builder, (waiting requests, prompt in progress); the next if the one before has no room.

        `beside`: a batch is paused. Then only what was picked, for the builder would fill a whole chunk, and no prompt
        in progress on its own, for it would be cut.
        """
        if cls is SHORT and beside:
            yield [views.short[i] for i in plan.picked], None
            return
        if cls is SHORT:
            first = set(plan.picked)
            rest = [r for i, r in enumerate(views.short[:LOOKAHEAD]) if i not in first]
            yield [views.short[i] for i in plan.picked] + rest + views.short[LOOKAHEAD:], None
            return
        picked = [longs[i] for i in plan.longs]
        in_progress = self._laps_in_progress()
        slot = next((r for r in picked if r in in_progress), None)
        joining = [views.short[i] for i in plan.picked] if plan.mixed else []
        yield [*joining, *(r for r in picked if r is not slot)], slot
        # A prompt in progress has its memory: it can go on where another cannot start.
        for req in in_progress if not beside else ():
            if req is not slot:
                yield [], req

    @contextmanager
    def _laps_only(
        self, cls: LengthClass, queue: list[Req], slot: Req | None, tokens: int = 0, *, whole: bool
    ) -> Iterator[Shown]:
        """Show the batch builder these waiting requests and this prompt in progress.

        `tokens`: new tokens of a long batch, if not what the server's chunk holds. `whole`: nothing may be cut.
        """
        waiting, held, full_chunk = self.waiting_queue, self.chunked_req, self.chunked_prefill_size
        if cls is LONG and tokens and full_chunk and not self.enable_staging:
            self.chunked_prefill_size = min(tokens, full_chunk)
        self.waiting_queue, self.chunked_req = list(queue), slot
        self._laps_building = cls
        self._laps_adder = self._laps_adder_for(cls, queue, slot, tokens, whole=whole, held=held)
        shown = Shown()
        try:
            yield shown
        finally:
            self._laps_building = self._laps_adder = None
            self.chunked_prefill_size = full_chunk
            shown.cut, self.chunked_req = self.chunked_req, held
            gone, added = changes(queue, self.waiting_queue)
            if gone:
                waiting = without(waiting, gone)
                self._laps_classes.took(cls, gone, waiting)
            self.waiting_queue = waiting + added if added else waiting
        if whole and shown.cut is not None:
            raise RuntimeError(f"LAPS: {shown.cut.rid} was cut in a batch of whole requests")

    def _laps_adder_for(
        self, cls: LengthClass, queue: Sequence[Req], slot: Req | None, tokens: int, *, whole: bool, held: Req | None
    ) -> Any:
        others = [r for r in (held, *self._laps_parked) if r is not None and r is not slot]
        reserve = sum(self._laps_needs(r) for r in others)
        if cls is SHORT:
            return partial(ShortPrefillAdder, self._laps_classes, self.laps_lacks_memory, reserve=reserve)
        if whole:
            return partial(WholePrefillAdder, self._laps_classes, self.laps_lacks_memory, reserve=reserve)
        # Only the last of a batch is cut: a prompt in progress gets what those before it leave, if they all run whole.
        page = self.page_size
        left = tokens - sum(-(-r.laps_tag.new_tokens // page) * page for r in queue)
        limit = left // self._laps_unit * self._laps_unit if slot is not None and left >= self._laps_unit else None
        return partial(LapsPrefillAdder, self._laps_classes, self.laps_lacks_memory, reserve=reserve, limit=limit)

    def laps_lacks_memory(self, tokens: int) -> None:
        """The first long prompt found too little memory. One that an empty pool could not hold waits for nothing."""
        self._laps_lacking = tokens < self.max_total_num_tokens

    def _laps_needs(self, req: Req) -> int:
        """KV tokens that a prompt in progress still needs: with them taken it could not go on."""
        return len(req.full_untruncated_fill_ids) - (req.extend_end or 0) + self.page_size

    def get_prefill_adder_class(self) -> Any:
        """The stock adder, or the one for the batch that is built."""
        return super().get_prefill_adder_class() if self._laps_adder is None else self._laps_adder

    def _laps_hand_over(self, slot: Req | None, cut: Req | None) -> None:
        """A long batch was built: `cut` holds the slot now, those that had no part in it are parked."""
        every = self._laps_in_progress()
        self.chunked_req = cut
        self._laps_parked = [r for r in every if r is not slot and r is not cut]

    def ingest_requests(self, stop_at_pause: bool = False) -> Any:
        """Receive requests. While a short batch is held back the overlap loop is told that something came, or it
        would not ask for a batch again before the one that runs is done."""
        received = super().ingest_requests(stop_at_pause)
        return received or ([None] if self._laps_waiting else received)

    def process_prefill_chunk(self, last_batch: ScheduleBatch | None, running_batch: ScheduleBatch) -> None:
        """Check in and send the chunk that ran last, once: a parked prompt has nothing new to send."""
        if not self.laps_on:
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)
            return
        self._laps_parked = [r for r in self._laps_parked if self._laps_wanted(r)]
        if self.chunked_req is None or self._laps_chunk_unsent:
            self._laps_chunk_unsent = False
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)
            return
        held = self.chunked_req if self._laps_wanted(self.chunked_req) else None
        self.chunked_req = held
        with self._laps_slot(None):
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)

    def _laps_wanted(self, req: Req) -> bool:
        """False once no decode server will take a prompt that was begun before its server was known: then it has been
        answered and its memory is free."""
        return not req.pending_bootstrap or self.check_bootstrap(req) or not is_aborted(req)

    @contextmanager
    def _laps_slot(self, req: Req | None) -> Iterator[None]:
        """Have `req` in the slot for the prompt in progress."""
        held, self.chunked_req = self.chunked_req, req
        try:
            yield
        finally:
            self.chunked_req = held

    # -- what the rest of SGLang must see

    def _collect_inflight_batches(self) -> list[ScheduleBatch | None]:
        """With the batches that are paused: their requests can be aborted."""
        batches: list[ScheduleBatch | None] = super()._collect_inflight_batches()
        return [*batches, *(f.batch for f in self._laps_under_way)] if self.laps_on else batches

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing runs, waits, or is parked."""
        idle: bool = super().is_fully_idle(*args, **kwargs)
        return idle and not (self._laps_parked or self._laps_under_way) if self.laps_on else idle

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort; of parked prompts too, each once it is safe."""
        super().abort_request(recv_req)
        if not self.laps_on:
            return
        for req in self._laps_parked:
            if recv_req.abort_all or req.rid.startswith(recv_req.rid):
                self._laps_aborted.append(req)

    def process_pending_chunked_abort(self) -> None:
        """SGLang ends the prompt in the slot; so, one after the other, the parked ones."""
        super().process_pending_chunked_abort()
        if not self.laps_on or not self._laps_aborted:
            return
        aborted, self._laps_aborted = self._laps_aborted, []
        for req in aborted:
            if req is self.chunked_req:
                self._pending_chunked_abort_req = req
                super().process_pending_chunked_abort()
            elif req in self._laps_parked:
                with self._laps_slot(req):
                    pending, self._pending_chunked_abort_req = self._pending_chunked_abort_req, req
                    super().process_pending_chunked_abort()
                    self._pending_chunked_abort_req = pending
                self._laps_parked.remove(req)

    # -- batches on the device

    def _laps_built(self, cls: LengthClass, batch: ScheduleBatch, plan: Plan, cut: Req | None, *, within: bool) -> None:
        self._laps_classes.batches += 1
        count, short = len(batch.reqs), []
        if cls is LONG and plan.mixed:
            short = [i for i, r in enumerate(batch.reqs) if r is not cut and self._laps_classes.of(r) is SHORT]
            cls = SHORT if len(short) == count else LONG
        now = time.perf_counter()
        launch = self._laps_pacer.launched(now, cls, count, plan, shorts=len(short), within=within)
        shape = list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
        self._laps_next = Flight(launch, batch, list(batch.reqs), shape, cut, short, within=within)
        if cls is LONG and plan.layers and self._laps_slices is not None and slices.fits(batch):
            self._laps_next.layers = plan.layers
        if cls is LONG and not within:
            self._laps_chunk_unsent = cut is not None
        if cut is not None:
            cut.laps_tag.chunk_s = now
        if batch.prefill_stats is not None:
            chunk = 0 if cut is None else cut.extend_len
            batch.prefill_stats.num_pending_tokens = self.load_inquirer._get_num_pending_tokens(chunk_deduct=chunk)

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        """Run a batch, in slices if it is one of long work."""
        if not self.laps_on or self._laps_next is None:
            return super().run_batch(batch, *args, **kwargs)
        flight, self._laps_next = self._laps_next, None
        runner = self.tp_worker.model_runner
        replays = graphs.replays(runner)
        flight.started = time.perf_counter()
        with self._laps_in_slices(flight):
            result = super().run_batch(batch, *args, **kwargs)
        if self._laps_synchronous:
            # The overlap loop runs the next batch before it processes this one's result.
            flight.done = time.perf_counter()
        flight.replays = graphs.replays(runner) - replays
        self._laps_flights[id(result)] = flight
        return result

    @contextmanager
    def _laps_in_slices(self, flight: Flight) -> Iterator[None]:
        if not flight.layers or self._laps_slices is None:
            with nullcontext():
                yield
            return
        self._laps_under_way.append(flight)
        try:
            with self._laps_slices.cut(flight.layers, partial(self._laps_interlude.pause, flight)):
                yield
        finally:
            self._laps_under_way.remove(flight)
            self._laps_pacer.launch_s = self._laps_slices.launch_s

    def laps_preempt(self, flight: Flight, layers_left: int) -> NextBatchPlan | None:
        """Between two slices of `flight`: what preempts it, built; None = it goes on."""
        shape_s = self._laps_pacer.model.predict(flight.shape)
        assert self._laps_slices is not None
        left_s = (shape_s or float("inf")) * layers_left / self._laps_slices.layers
        running = Running(left_s, sum(len(f.shape) for f in self._laps_under_way), len(self._laps_under_way))
        built = self._laps_build(self.running_batch, running)
        return None if built.batch_to_run is None else built

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Process a result and enter the device time it took."""
        if not self.laps_on:
            super().process_batch_result(batch, result)
            return
        if self._laps_interlude.processed(result):
            return
        flight = self._laps_flights.pop(id(result), None)
        if flight is not None and flight.done is None and result.copy_done is not None:
            # The stock method waits for the same event first; what it does after that is not the step.
            result.copy_done.synchronize()
            flight.done = time.perf_counter()
        # It asks the slot whether a cut prompt goes on.
        parked = flight is not None and flight.cut in self._laps_parked
        with self._laps_slot(flight.cut) if parked and flight else nullcontext():
            super().process_batch_result(batch, result)
        if flight is None:
            return
        now = time.perf_counter()
        self._laps_books.ended(flight, self._laps_under_way[-1] if self._laps_under_way else None, now)
        if self._laps_series is not None:
            self._laps_show(self._laps_series, now)

    def on_idle(self) -> None:
        """Idle housekeeping; the gauges follow."""
        if self.laps_on and self._laps_series is not None:
            self._laps_show(self._laps_series, time.perf_counter())
        if self.laps_on and self._laps_saves:
            self._laps_pacer.save_when_due(time.perf_counter())
        if self.laps_on and self.laps_config.graphs and self.is_fully_idle():
            graphs.idle(self.tp_worker.model_runner)
        super().on_idle()

    # -- status

    def _laps_show(self, series: Series, now: float) -> None:
        if now - self._laps_shown >= self.laps_config.status_period_s:
            self._laps_shown = now
            series.show(self.laps_status())

    def get_internal_state(self, recv_req: Any) -> Any:
        """SGLang's internal state with a "laps" entry: /server_info and /laps_status read it."""
        output = super().get_internal_state(recv_req)
        output.internal_state["laps"] = self.laps_status()
        return output

    def laps_status(self) -> dict[str, Any]:
        """What this scheduler is doing."""
        return snapshot(self)


def first_of_all(parallel: Any) -> bool:
    """Whether this is the first rank of the first data-parallel one: it alone writes files."""
    return not (parallel.attn_tp_rank or parallel.attn_dp_rank or parallel.dp_rank)


def scheduler_class(stock: type, config: LapsConfig) -> type:
    """The subclass of SGLang's Scheduler that LAPS puts in its place."""
    return type("LapsScheduler", (LapsPrefillMixin, stock), {"laps_config": config})
