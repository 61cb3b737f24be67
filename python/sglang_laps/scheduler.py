"""The glue between ``policy/`` and SGLang's prefill scheduler.

``Scheduler.waiting_queue`` stays the only list of waiting requests and ``Scheduler.chunked_req`` the only parked
prefill. Around each call of the stock batch builder the mixin shows it one class of them; whatever happens in there,
both are whole again afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.runtime_context import get_parallel, get_serving

from sglang_laps import __version__, deadlines, graphs
from sglang_laps.pacing import LOOKAHEAD, LongWork, Pacer, Plan, Waiting
from sglang_laps.policy.busy import BusyMeter
from sglang_laps.policy.config import AUTO, LapsConfig
from sglang_laps.policy.fairness import Launch
from sglang_laps.policy.length import LONG, SHORT, LengthClass, classify, new_tokens, usable_threshold
from sglang_laps.policy.queues import DualQueue, Views, changes, split, without
from sglang_laps.status import Series, Totals
from sglang_laps.support import off_reason, resolved

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler as Stock
else:
    Stock = object  # the class it is mixed into, see scheduler_class

logger = logging.getLogger(__name__)

RELOOK = 4
"""Waiting long requests matched against the prefix cache again after each batch: what has been computed since may have
made them short."""


@dataclass(slots=True)
class Tag:
    """What LAPS remembers of a request, on the request itself. Times are those of ``time.perf_counter``."""

    since: float
    """When it was first seen waiting."""
    arrival: float
    """When it reached the server."""
    slo_s: float | None
    new_tokens: int = 0
    history: int = 0
    """Cached tokens."""
    looked: int = -1
    """Batch count at its last look into the prefix cache."""


@dataclass(slots=True)
class Flight:
    """A batch on the device."""

    launch: Launch
    shape: list[tuple[int, int]]
    """(new, history) tokens of each request."""
    ending: list[Req]
    """Requests whose prefill ends with it."""
    started: float
    """When it went to the device; until then, when it was built."""
    done: float | None = None
    """When its device work was done; None = known only when its result is processed."""
    replays: int = 0


class LapsPrefillAdder(PrefillAdder):  # type: ignore[misc]
    """Builds a batch of short requests: never cut, never into the memory a parked long prefill still needs."""

    def __init__(self, scheduler: LapsPrefillMixin, reserve_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scheduler = scheduler
        self.memory_budget.total_offset += reserve_tokens

    def _select_prefill_admission(self, req: Req, **kwargs: Any) -> Any:
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        return admission if self._whole(req, admission.extend_len, admission.is_chunked) else AddReqResult.OTHER

    def add_one_req_ignore_eos(self, req: Req) -> Any:
        """SGLang's way past ``_select_prefill_admission``, for ``ignore_eos`` where the prefix cache is off."""
        extend_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
        cut = self.rem_chunk_tokens is not None and extend_tokens > self.rem_chunk_tokens
        return super().add_one_req_ignore_eos(req) if self._whole(req, extend_tokens, cut) else AddReqResult.OTHER

    def _whole(self, req: Req, extend_tokens: int, cut: bool) -> bool:
        """Whether the request may join: short still, and not `cut` into chunks."""
        if self._scheduler.laps_outgrown(req, extend_tokens):
            return False
        if cut and not self.can_run_list:
            # Not even an empty batch holds it (a sliding window's cap on chunks, say).
            self._scheduler.laps_make_long(req)
        return not cut


def _waiting(req: Req) -> Waiting:
    tag = req.laps_tag
    deadline = None if tag.slo_s is None else tag.arrival + tag.slo_s
    return tag.new_tokens, tag.history, tag.since, deadline, req.rid


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
    _laps_hidden: Req | None = None

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
        self._laps_threshold = usable_threshold(wanted, self._laps_chunk_budget(), self.page_size)
        if self._laps_threshold < wanted:
            logger.warning(
                "LAPS: the length threshold is lowered from %d to %d tokens, what one chunk holds.",
                wanted,
                self._laps_threshold,
            )
        self._laps_pacer = Pacer(
            config, threshold=self._laps_threshold, chunk_tokens=self._laps_chunk_budget(), page_size=self.page_size
        )
        graphs.use_model(self.tp_worker.model_runner, self._laps_pacer.model.predict)
        self._laps_busy = BusyMeter()
        self._laps_dual: DualQueue[Req] = DualQueue()
        # The builder counts the waiting tokens for its log line, but sees one class: counted after it (_laps_built).
        self.load_inquirer = replace(
            self.load_inquirer, get_waiting_queue=lambda: self.waiting_queue if self._laps_building is None else []
        )
        self._laps_flights: dict[int, Flight] = {}
        self._laps_next: Flight | None = None
        self._laps_batches = 0
        self._laps_new_shorts = 0
        self._laps_chunk_unsent = False
        self._laps_parked_since: float | None = None
        self._laps_totals = {SHORT: Totals(), LONG: Totals()}
        self._laps_synchronous = torch.device(self.device).type == "cpu"
        self._laps_leader = get_parallel().attn_tp_rank == 0
        self._laps_saves = first_of_all(get_parallel())
        self._laps_started = self._laps_shown = self._laps_last_end = time.perf_counter()
        if self.metrics_reporter.enable_metrics and self._laps_leader:
            self._laps_series = Series(self._laps_labels())
        self.laps_on = True

    def _laps_labels(self) -> dict[str, str]:
        return {"model_name": get_serving().served_model_name, "dp_rank": str(get_parallel().dp_rank or 0)}

    def _laps_chunk_budget(self) -> int | None:
        budgets = [b for b in (self.chunked_prefill_size, self.max_prefill_tokens) if b is not None and b > 0]
        return min(budgets) if self.chunked_prefill_size is not None else None

    # -- classes

    def _laps_class(self, req: Req) -> LengthClass:
        tag = getattr(req, "laps_tag", None)
        if tag is None:
            now = time.perf_counter()
            tag = req.laps_tag = Tag(now, deadlines.arrival(req, now), deadlines.slo_s(req, self.laps_config))
            self._laps_look(req, tag)
            self._laps_new_shorts += tag.new_tokens <= self._laps_threshold
        return classify(tag.new_tokens, self._laps_threshold)

    def _laps_look(self, req: Req, tag: Tag) -> None:
        if req.positional_embed_overrides is None:
            match_kv_cache(req, self.tree_cache)
            tag.history = min(req.num_matched_prefix_tokens, req.seqlen - 1)
        tag.new_tokens = new_tokens(req.seqlen, tag.history, self.laps_config.length_basis)
        tag.looked = self._laps_batches

    def _laps_use_threshold(self, tokens: int) -> None:
        if tokens and tokens != self._laps_threshold:
            self._laps_threshold = tokens
            self._laps_dual.forget()

    def laps_outgrown(self, req: Req, extend_tokens: int) -> bool:
        """Whether a request that waited as short is long by now (its prefix was evicted); it then waits as long."""
        if self.laps_config.length_basis == "prompt" or extend_tokens <= self._laps_threshold:
            return False
        self.laps_make_long(req)
        return True

    def laps_make_long(self, req: Req) -> None:
        """Have a request wait as long, at least until the next batch."""
        tag: Tag = req.laps_tag
        tag.new_tokens, tag.looked = max(tag.new_tokens, self._laps_threshold + 1), self._laps_batches
        self._laps_dual.forget()

    def _laps_views(self) -> Views[Req]:
        views = self._laps_dual.views(self.waiting_queue, self._laps_class)
        if self.laps_config.length_basis == "prompt":
            return views
        looks, changed = 0, False
        for req in views.long:
            tag = req.laps_tag
            if tag.looked != self._laps_batches:
                self._laps_look(req, tag)
                changed |= tag.new_tokens <= self._laps_threshold
                looks += 1
                if looks == RELOOK:
                    break
        if changed:
            self._laps_dual.forget()
            return self._laps_dual.views(self.waiting_queue, self._laps_class)
        return views

    # -- one round

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        """Build the next batch from one class of the waiting requests."""
        if not self.laps_on or self.disaggregation_mode != DisaggregationMode.PREFILL:
            return super().get_new_batch_prefill(running_batch)
        views = self._laps_views()
        plan = self._laps_plan(views)
        self._laps_waiting = plan.waiting
        self._laps_use_threshold(plan.threshold)
        contended = bool(views.short) and (bool(views.long) or self.chunked_req is not None)
        for cls in plan.order:
            with self._laps_only(cls, self._laps_queue_of(cls, views, plan), plan.chunk_tokens):
                built = super().get_new_batch_prefill(running_batch)
            running_batch = built.running_batch
            if built.batch_to_run is not None:
                self._laps_built(cls, built.batch_to_run, plan, contended=contended)
                return built
        if not plan.order:
            # The builder also polls the grammar queue.
            with self._laps_only(SHORT, []):
                built = super().get_new_batch_prefill(running_batch)
        return built

    def _laps_plan(self, views: Views[Req]) -> Plan:
        """This round's decision: the leading rank's, on every rank."""
        if not self.waiting_queue and self.chunked_req is None:
            if self._laps_leader:
                self._laps_pacer.arrived(time.perf_counter(), 0)
                self._laps_pacer.share.long_done()
            return Plan(())
        plan = self._laps_decide(views) if self._laps_leader else Plan(())
        self._laps_new_shorts = 0
        if get_parallel().attn_tp_size == 1:
            return plan
        box = torch.tensor(plan.numbers(), dtype=torch.int64)
        self._laps_from_leader(box)
        return plan if self._laps_leader else Plan.of(box.tolist())

    def _laps_from_leader(self, box: torch.Tensor) -> None:
        group = self.attn_tp_cpu_group
        torch.distributed.broadcast(box, src=torch.distributed.get_global_rank(group, 0), group=group)

    def _laps_decide(self, views: Views[Req]) -> Plan:
        now = time.perf_counter()
        self._laps_pacer.arrived(now, self._laps_new_shorts)
        return self._laps_pacer.plan(
            now,
            [_waiting(r) for r in views.short[:LOOKAHEAD]],
            # Looked at for their order only.
            [_waiting(r) for r in views.long[:LOOKAHEAD]] if self.laps_config.order != "fcfs" else [],
            short=bool(views.short),
            long=self._laps_long_work(views),
            urgent=self._laps_urgent(views) if views.short else None,
        )

    def _laps_long_work(self, views: Views[Req]) -> LongWork | None:
        parked = self.chunked_req
        if parked is not None:
            done = max(parked.prefix_len, parked.extend_end or 0)
            return LongWork(parked.seqlen - done, done, parked.laps_tag.since, parked.laps_tag.new_tokens)
        if views.long:
            tag = views.long[0].laps_tag
            return LongWork(tag.new_tokens, tag.history, tag.since, tag.new_tokens)
        return None

    def _laps_queue_of(self, cls: LengthClass, views: Views[Req], plan: Plan) -> list[Req]:
        if cls is LONG and plan.long_first:
            first_long = views.long[plan.long_first]
            return [first_long, *(r for r in views.long if r is not first_long)]
        if cls is LONG or not plan.picked:
            return views.of(cls)
        first = set(plan.picked)
        rest = [r for i, r in enumerate(views.short[:LOOKAHEAD]) if i not in first]
        return [views.short[i] for i in plan.picked] + rest + views.short[LOOKAHEAD:]

    def ingest_requests(self, stop_at_pause: bool = False) -> Any:
        """Receive requests. While a short batch is held back the overlap loop is told that something came, or it
        would not ask for a batch again before the one that runs is done."""
        received = super().ingest_requests(stop_at_pause)
        return received or ([None] if self._laps_waiting else received)

    def _laps_urgent(self, views: Views[Req]) -> LengthClass | None:
        """The class with the strictly higher priority under --enable-priority-scheduling.

        A parked prefill holds the one slot for chunks, so it goes with the most urgent of the long requests behind it.
        """
        if not self.enable_priority_scheduling or not (views.long or self.chunked_req is not None):
            return None
        sign = self.policy.priority_sign
        parked = [self.chunked_req] if self.chunked_req is not None else []
        best = {
            cls: min(sign * (r.priority or 0) for r in reqs)
            for cls, reqs in ((SHORT, views.short), (LONG, [*views.long, *parked]))
        }
        if best[SHORT] == best[LONG]:
            return None
        return SHORT if best[SHORT] < best[LONG] else LONG

    @contextmanager
    def _laps_only(self, cls: LengthClass, queue: list[Req], chunk_tokens: int = 0) -> Iterator[None]:
        """Show the batch builder one class: its waiting requests and, if it is the long one, the parked prefill.

        `chunk_tokens`: size of a long chunk, if not the server's.
        """
        whole, parked, full_chunk = self.waiting_queue, self.chunked_req, self.chunked_prefill_size
        if cls is LONG and chunk_tokens and full_chunk and not self.enable_staging:
            self.chunked_prefill_size = min(chunk_tokens, full_chunk)
        self.waiting_queue = list(queue)
        self._laps_building = cls
        if cls is SHORT:
            self.chunked_req, self._laps_hidden = None, parked
        try:
            yield
            if cls is SHORT and self.chunked_req is not None:
                # Going on would lose it to the parked one: its client would wait for ever and its memory leak.
                raise RuntimeError(f"LAPS: short request {self.chunked_req.rid} was cut into chunks")
        finally:
            self._laps_building = self._laps_hidden = None
            self.chunked_prefill_size = full_chunk
            gone, added = changes(queue, self.waiting_queue)
            if cls is SHORT and parked is not None:
                self.chunked_req = parked
            if gone:
                whole = without(whole, gone)
                self._laps_dual.took(cls, gone, whole)
            self.waiting_queue = whole + added if added else whole

    def get_prefill_adder_class(self) -> Any:
        """The stock adder, or, while a short batch is built, the one that keeps shorts whole."""
        if self._laps_building is not SHORT:
            return super().get_prefill_adder_class()
        return lambda *args, **kwargs: LapsPrefillAdder(self, self._laps_reserve(), *args, **kwargs)

    def _laps_reserve(self) -> int:
        """KV tokens the parked prefill still needs: with them taken it could not go on."""
        parked = self._laps_hidden
        if parked is None:
            return 0
        return len(parked.full_untruncated_fill_ids) - (parked.extend_end or 0) + self.page_size

    def process_prefill_chunk(self, last_batch: ScheduleBatch | None, running_batch: ScheduleBatch) -> None:
        """Check in and send the chunk that ran last, once: a parked prefill has nothing new to send."""
        if not self.laps_on:
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)
            return
        if self.chunked_req is None or self._laps_chunk_unsent:
            self._laps_chunk_unsent = False
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)
            return
        parked, self.chunked_req = self.chunked_req, None
        try:
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)
        finally:
            self.chunked_req = parked

    # -- batches on the device

    def _laps_built(self, cls: LengthClass, batch: ScheduleBatch, plan: Plan, *, contended: bool) -> None:
        self._laps_batches += 1
        now = time.perf_counter()
        cut = self.chunked_req if cls is LONG else None
        self._laps_next = Flight(
            self._laps_pacer.launched(now, cls, len(batch.reqs), plan, contended=contended),
            list(zip(batch.extend_lens, batch.prefix_lens, strict=True)),
            [r for r in batch.reqs if r is not cut],
            now,
        )
        if cls is LONG:
            self._laps_chunk_unsent = cut is not None
            self._laps_parked_since = None
        elif self.chunked_req is not None and self._laps_parked_since is None:
            self._laps_parked_since = now
        if batch.prefill_stats is not None:
            chunk = 0 if cut is None else cut.extend_len
            batch.prefill_stats.num_pending_tokens = self.load_inquirer._get_num_pending_tokens(chunk_deduct=chunk)

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        """Run a batch, noting when it went to the device."""
        if not self.laps_on or self._laps_next is None:
            return super().run_batch(batch, *args, **kwargs)
        flight, self._laps_next = self._laps_next, None
        replays = graphs.replays(self.tp_worker.model_runner)
        flight.started = time.perf_counter()
        result = super().run_batch(batch, *args, **kwargs)
        if self._laps_synchronous:
            # The overlap loop runs the next batch before it processes this one's result.
            flight.done = time.perf_counter()
        flight.replays = graphs.replays(self.tp_worker.model_runner) - replays
        self._laps_flights[id(result)] = flight
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Process a result and enter the device time it took."""
        flight = self._laps_flights.pop(id(result), None) if self.laps_on else None
        if flight is not None and flight.done is None and result.copy_done is not None:
            # The stock method waits for the same event first; what it does after that is not the step.
            result.copy_done.synchronize()
            flight.done = time.perf_counter()
        super().process_batch_result(batch, result)
        if flight is None:
            return
        now = time.perf_counter()
        end = flight.done or now
        # With two batches in flight the second starts on the device when the first ends.
        begin = max(flight.started, self._laps_last_end)
        self._laps_last_end = end
        self._laps_busy.add(begin, end)
        cls = flight.launch.cls
        self._laps_pacer.finished(flight.launch, begin, end, now, flight.shape, stock=flight.replays == 0)
        for req in flight.ending:
            self._laps_pacer.slo.record(now, cls.value, now - req.laps_tag.arrival, req.laps_tag.slo_s)
        done = Totals(1, len(flight.shape), sum(new for new, _ in flight.shape), end - begin)
        self._laps_totals[cls].add(done)
        if self._laps_series is not None:
            self._laps_series.count(cls.value, done)
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
        """What this scheduler is doing, JSON-ready. Times in seconds, lengths in tokens.

        Asking changes nothing: ranks are asked at different moments, or only one is, and must not part by it.
        """
        head = {"version": __version__, "config": self.laps_config.as_dict()}
        if not self.laps_on:
            return {"enabled": False, "reason": self._laps_off_reason, **head}
        now = time.perf_counter()
        tags = [getattr(r, "laps_tag", None) or self._laps_unseen(r, now) for r in self.waiting_queue]
        views = split(tags, lambda tag: classify(tag.new_tokens, self._laps_threshold))
        queues = {cls.value: _queue(views.of(cls), now) for cls in LengthClass}
        parked = self.chunked_req
        remaining = 0 if parked is None else max(0, parked.seqlen - parked.prefix_len)
        return {
            "enabled": True,
            **head,
            "queues": queues,
            "parked": None
            if parked is None or self._laps_parked_since is None
            else {
                "rid": parked.rid,
                "done_tokens": parked.prefix_len,
                "total_tokens": parked.seqlen,
                "parked_s": now - self._laps_parked_since,
            },
            **self._laps_pacer.status(now),
            "totals": {cls.value: asdict(total) for cls, total in self._laps_totals.items()},
            "graphs": graphs.status(self.tp_worker.model_runner),
            "load": {
                "backlog_tokens": sum(q["waiting_tokens"] for q in queues.values()) + remaining,
                "slo_deviation": self._laps_pacer.slo.deviation(now),
                "busy_share": self._laps_busy.share(now),
            },
            "uptime_s": now - self._laps_started,
        }

    def _laps_unseen(self, req: Req, now: float) -> Tag:
        """For the status: a request that no round has looked at yet (the server may be paused) counts in full."""
        arrival = deadlines.arrival(req, now)
        return Tag(arrival, arrival, None, new_tokens=req.seqlen)


def _queue(tags: list[Tag], now: float) -> dict[str, Any]:
    return {
        "depth": len(tags),
        "waiting_tokens": sum(t.new_tokens for t in tags),
        "oldest_wait_s": max((now - t.since for t in tags), default=0.0),
    }


def first_of_all(parallel: Any) -> bool:
    """Whether this is the first rank of the first data-parallel one: it alone writes files."""
    return not (parallel.attn_tp_rank or parallel.attn_dp_rank or parallel.dp_rank)


def scheduler_class(stock: type, config: LapsConfig) -> type:
    """The subclass of SGLang's Scheduler that LAPS puts in its place."""
    return type("LapsScheduler", (LapsPrefillMixin, stock), {"laps_config": config})
