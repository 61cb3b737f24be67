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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.runtime_context import get_parallel

from sglang_laps import __version__, graphs
from sglang_laps.plugin import conflict, off_reason
from sglang_laps.policy.busy import BusyMeter
from sglang_laps.policy.config import AUTO, LapsConfig
from sglang_laps.policy.fairness import Launch, LongShare
from sglang_laps.policy.length import LONG, SHORT, LengthClass, classify, new_tokens, usable_threshold
from sglang_laps.policy.queues import Views, split, turn
from sglang_laps.status import Series, Totals

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch

logger = logging.getLogger(__name__)

RELOOK = 4
"""Waiting long requests matched against the prefix cache again after each batch: what has been computed since may have
made them short."""


@dataclass(slots=True)
class Tag:
    """What LAPS remembers of a request, on the request itself."""

    cls: LengthClass
    new_tokens: int
    since: float
    """When it was first seen waiting (monotonic seconds)."""
    looked: int
    """Batch count at its last look into the prefix cache."""


@dataclass(slots=True)
class Flight:
    """A batch on the device."""

    launch: Launch
    started: float
    requests: int
    tokens: int


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
        if self._scheduler.laps_outgrown(req, admission.extend_len) or admission.is_chunked:
            return AddReqResult.OTHER
        return admission


class LapsPrefillMixin:
    """Length-aware prefill scheduling, mixed in before SGLang's Scheduler."""

    laps_config: LapsConfig
    laps_on = False
    _laps_building: LengthClass | None = None
    _laps_hidden: Req | None = None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = off_reason(self.server_args) or conflict(self.server_args)
        if reason:
            logger.warning("LAPS scheduler is off: %s.", reason)
            self._laps_off_reason = reason
            return
        self._laps_off_reason = None
        config = self.laps_config
        wanted = 256 if config.length_threshold == AUTO else int(config.length_threshold)
        self._laps_threshold = usable_threshold(wanted, self._laps_chunk_budget(), self.page_size)
        if self._laps_threshold < wanted:
            logger.warning(
                "LAPS: the length threshold is lowered from %d to %d tokens, what one chunk holds.",
                wanted,
                self._laps_threshold,
            )
        self._laps_share = LongShare(config.long_share)
        self._laps_busy = BusyMeter()
        self._laps_flights: dict[int, Flight] = {}
        self._laps_next: Flight | None = None
        self._laps_last_end = 0.0
        self._laps_batches = 0
        self._laps_chunk_unsent = False
        self._laps_parked_since: float | None = None
        self._laps_totals = {SHORT: Totals(), LONG: Totals()}
        self._laps_leader = get_parallel().attn_tp_rank == 0
        self._laps_started = self._laps_shown = time.monotonic()
        self._laps_series = None
        if self.metrics_reporter.enable_metrics and self._laps_leader:
            self._laps_series = Series(self._laps_labels())
        self.laps_on = True

    def _laps_labels(self: Any) -> dict[str, str]:
        model = self.server_args.served_model_name or self.server_args.model_path
        return {"model_name": model, "dp_rank": str(get_parallel().dp_rank or 0)}

    def _laps_chunk_budget(self: Any) -> int | None:
        budgets = [b for b in (self.chunked_prefill_size, self.max_prefill_tokens) if b is not None and b > 0]
        return min(budgets) if self.chunked_prefill_size is not None else None

    # -- classes

    def _laps_class(self: Any, req: Req) -> LengthClass:
        tag = getattr(req, "laps_tag", None)
        if tag is None:
            tag = req.laps_tag = Tag(SHORT, 0, time.monotonic(), -1)
            self._laps_look(req, tag)
        return tag.cls

    def _laps_look(self: Any, req: Req, tag: Tag) -> None:
        matched = 0
        if self.laps_config.length_basis != "prompt" and req.positional_embed_overrides is None:
            match_kv_cache(req, self.tree_cache)
            matched = req.num_matched_prefix_tokens
        tag.new_tokens = new_tokens(req.seqlen, matched, self.laps_config.length_basis)
        tag.cls = classify(tag.new_tokens, self._laps_threshold)
        tag.looked = self._laps_batches

    def laps_outgrown(self, req: Req, extend_tokens: int) -> bool:
        """Whether a request that waited as short is long by now (its prefix was evicted); it then waits as long."""
        tag: Tag = req.laps_tag
        if self.laps_config.length_basis == "prompt" or extend_tokens <= self._laps_threshold:
            return False
        tag.new_tokens, tag.cls = extend_tokens, LONG
        return True

    def _laps_views(self: Any) -> Views[Req]:
        if self.laps_config.length_basis != "prompt":
            looks = 0
            for req in self.waiting_queue:
                tag = getattr(req, "laps_tag", None)
                if tag is not None and tag.cls is LONG and tag.looked != self._laps_batches:
                    self._laps_look(req, tag)
                    looks += 1
                    if looks == RELOOK:
                        break
        return split(self.waiting_queue, self._laps_class)

    # -- one round

    def get_new_batch_prefill(self: Any, running_batch: ScheduleBatch) -> NextBatchPlan:
        """Build the next batch from one class of the waiting requests."""
        if not self.laps_on or self.disaggregation_mode != DisaggregationMode.PREFILL:
            return super().get_new_batch_prefill(running_batch)
        views = self._laps_views()
        parked = self.chunked_req
        short, long = bool(views.short), bool(views.long) or parked is not None
        if not long:
            self._laps_share.long_done()
        plan = None
        for cls in self._laps_turn(views, short, long):
            with self._laps_only(cls, views.of(cls)):
                plan = super().get_new_batch_prefill(running_batch)
            running_batch = plan.running_batch
            if plan.batch_to_run is not None:
                self._laps_built(cls, plan.batch_to_run, contended=short and long)
                return plan
        if plan is None:
            # The builder also polls the grammar queue.
            with self._laps_only(SHORT, []):
                plan = super().get_new_batch_prefill(running_batch)
        return plan

    def _laps_turn(self: Any, views: Views[Req], short: bool, long: bool) -> tuple[LengthClass, ...]:
        if not (short and long):
            return turn(short=short, long=long, long_owed=False)
        owed = self._laps_agree(self._laps_share.owed())
        return turn(short=True, long=True, long_owed=owed, urgent=self._laps_urgent(views))

    def _laps_agree(self: Any, mine: bool) -> bool:
        """The leading rank's answer, on every rank: it comes from a clock, and theirs differ."""
        if get_parallel().attn_tp_size == 1:
            return mine
        box = torch.tensor([int(mine)], dtype=torch.int64)
        group = self.attn_tp_cpu_group
        torch.distributed.broadcast(box, src=torch.distributed.get_global_rank(group, 0), group=group)
        return bool(box.item())

    def _laps_urgent(self: Any, views: Views[Req]) -> LengthClass | None:
        """The class with the strictly higher priority under --enable-priority-scheduling.

        A parked prefill holds the one slot for chunks, so it goes with the most urgent of the long requests behind it.
        """
        if not self.enable_priority_scheduling:
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
    def _laps_only(self: Any, cls: LengthClass, queue: list[Req]) -> Iterator[None]:
        """Show the batch builder one class: its waiting requests and, if it is the long one, the parked prefill."""
        whole, parked = self.waiting_queue, self.chunked_req
        self.waiting_queue, shown = queue, list(queue)
        self._laps_building = cls
        if cls is SHORT:
            self.chunked_req, self._laps_hidden = None, parked
        try:
            yield
        finally:
            self._laps_building = self._laps_hidden = None
            left = self.waiting_queue
            if cls is SHORT and parked is not None:
                self.chunked_req = parked
            if left is queue and len(left) == len(shown):
                self.waiting_queue = whole
            else:
                kept, known = set(map(id, left)), set(map(id, shown))
                taken = known - kept
                added = [r for r in left if id(r) not in known]
                self.waiting_queue = [r for r in whole if id(r) not in taken] + added

    def get_prefill_adder_class(self: Any) -> Any:
        """The stock adder, or, while a short batch is built, the one that keeps shorts whole."""
        stock = super().get_prefill_adder_class()
        if self._laps_building is not SHORT:
            return stock
        if stock is not PrefillAdder:
            raise RuntimeError(f"LAPS extends SGLang's PrefillAdder; this scheduler uses {stock.__name__}")
        return lambda *args, **kwargs: LapsPrefillAdder(self, self._laps_reserve(), *args, **kwargs)

    def _laps_reserve(self: Any) -> int:
        """KV tokens the parked prefill still needs: with them taken it could not go on."""
        parked = self._laps_hidden
        if parked is None:
            return 0
        return len(parked.full_untruncated_fill_ids) - (parked.extend_end or 0) + self.page_size

    def process_prefill_chunk(self: Any, last_batch: ScheduleBatch | None, running_batch: ScheduleBatch) -> None:
        """Check in and send the chunk that ran last, once: a parked prefill has nothing new to send."""
        if not self.laps_on or self.chunked_req is None or self._laps_chunk_unsent:
            self._laps_chunk_unsent = False
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)
            return
        parked, self.chunked_req = self.chunked_req, None
        try:
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)
        finally:
            self.chunked_req = parked

    # -- batches on the device

    def _laps_built(self: Any, cls: LengthClass, batch: ScheduleBatch, *, contended: bool) -> None:
        self._laps_batches += 1
        self._laps_next = Flight(
            self._laps_share.launch(cls, contended=contended), 0.0, len(batch.reqs), batch.extend_num_tokens or 0
        )
        if cls is LONG:
            self._laps_chunk_unsent = self.chunked_req is not None
            self._laps_parked_since = None
        elif self.chunked_req is not None and self._laps_parked_since is None:
            self._laps_parked_since = time.monotonic()
        if batch.prefill_stats is not None:
            # Counted while the builder saw one class only.
            chunk = self.chunked_req.extend_len if cls is LONG and self.chunked_req is not None else 0
            batch.prefill_stats.num_pending_tokens = self.load_inquirer._get_num_pending_tokens(chunk_deduct=chunk)

    def run_batch(self: Any, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        """Run a batch, noting when it went to the device."""
        flight, self._laps_next = (self._laps_next, None) if self.laps_on else (None, None)
        if flight is not None:
            flight.started = time.monotonic()
        result = super().run_batch(batch, *args, **kwargs)
        if flight is not None:
            self._laps_flights[id(result)] = flight
        return result

    def process_batch_result(self: Any, batch: ScheduleBatch, result: Any) -> None:
        """Process a result and enter the device time it took."""
        super().process_batch_result(batch, result)
        flight = self._laps_flights.pop(id(result), None) if self.laps_on else None
        if flight is None:
            return
        end = time.monotonic()
        # With two batches in flight the second starts on the device when the first ends.
        begin = max(flight.started, self._laps_last_end)
        self._laps_last_end = end
        self._laps_busy.add(begin, end)
        self._laps_share.settle(flight.launch, end - begin)
        total, cls = self._laps_totals[flight.launch.cls], flight.launch.cls
        total.batches += 1
        total.requests += flight.requests
        total.tokens += flight.tokens
        total.busy_s += end - begin
        if self._laps_series is not None:
            self._laps_series.count(cls.value, Totals(1, flight.requests, flight.tokens, end - begin))
            self._laps_show(end)

    def on_idle(self: Any) -> None:
        """Idle housekeeping; the gauges follow."""
        if self.laps_on and self._laps_series is not None:
            self._laps_show(time.monotonic())
        if self.laps_on and self.laps_config.graphs and self.is_fully_idle():
            graphs.idle(self.tp_worker.model_runner)
        super().on_idle()

    # -- status

    def _laps_show(self: Any, now: float) -> None:
        if now - self._laps_shown >= self.laps_config.status_period_s:
            self._laps_shown = now
            self._laps_series.show(self.laps_status())

    def get_internal_state(self: Any, recv_req: Any) -> Any:
        """SGLang's internal state with a "laps" entry: /server_info and /laps_status read it."""
        output = super().get_internal_state(recv_req)
        output.internal_state["laps"] = self.laps_status()
        return output

    def laps_status(self: Any) -> dict[str, Any]:
        """What this scheduler is doing, JSON-ready. Times in seconds, lengths in tokens."""
        head = {"version": __version__, "config": self.laps_config.as_dict()}
        if not self.laps_on:
            return {"enabled": False, "reason": self._laps_off_reason, **head}
        now = time.monotonic()
        views = split(self.waiting_queue, self._laps_class)
        queues = {cls.value: self._laps_queue(views.of(cls), now) for cls in LengthClass}
        parked = self.chunked_req
        remaining = 0 if parked is None else max(0, parked.seqlen - parked.prefix_len)
        return {
            "enabled": True,
            **head,
            "threshold": {"tokens": self._laps_threshold, "basis": self.laps_config.length_basis, "source": "fixed"},
            "queues": queues,
            "parked": None
            if parked is None or self._laps_parked_since is None
            else {
                "rid": parked.rid,
                "done_tokens": parked.prefix_len,
                "total_tokens": parked.seqlen,
                "parked_s": now - self._laps_parked_since,
            },
            "fairness": {"long_share": self._laps_share.share, "credit_s": self._laps_share.credit_s},
            "totals": {cls.value: asdict(total) for cls, total in self._laps_totals.items()},
            "graphs": graphs.status(self.tp_worker.model_runner),
            "load": {
                "backlog_tokens": sum(q["waiting_tokens"] for q in queues.values()) + remaining,
                "slo_deviation": 0.0,
                "busy_share": self._laps_busy.share(now),
            },
            "uptime_s": now - self._laps_started,
        }

    def _laps_queue(self: Any, reqs: list[Req], now: float) -> dict[str, Any]:
        return {
            "depth": len(reqs),
            "waiting_tokens": sum(r.laps_tag.new_tokens for r in reqs),
            "oldest_wait_s": max((now - r.laps_tag.since for r in reqs), default=0.0),
        }


def scheduler_class(stock: type, config: LapsConfig) -> type:
    """The subclass of SGLang's Scheduler that LAPS puts in its place."""
    return type("LapsScheduler", (LapsPrefillMixin, stock), {"laps_config": config})
