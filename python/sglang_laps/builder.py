"""Wrapper of SGLang's batch builder: shows it only the requests that the plan picked, and restores the scheduler's
queue, slot and chunk size afterwards, also after an exception."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from laps_core.length import LONG, SHORT
from laps_core.policy.types import Paused, Plan
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy

from sglang_laps.adder import LapsPrefillAdder, ShortPrefillAdder, WholePrefillAdder
from sglang_laps.core import LapsCore
from sglang_laps.flights import Part, Queues
from sglang_laps.group import Group
from sglang_laps.ranks import Ranks
from sglang_laps.telemetry.receipts import Receipts
from sglang_laps.temporarily import temporarily

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


LOOK_S = 1e-4
"""Time for which a pause looks whether grammars are ready (seconds); SGLang waits 5 ms for them before each batch."""


class Builder:
    """Builder of one scheduler's batches."""

    def __init__(
        self,
        scheduler: Scheduler,
        core: LapsCore,
        ranks: Ranks,
        stock: Callable[[Any], NextBatchPlan],
        group: Group | None = None,
        ahead: Callable[[Part], int] = lambda _: 0,
        mixes: bool = False,
        receipts: Receipts | None = None,
    ) -> None:
        """`stock`: SGLang's method that builds the next batch. `group`: plans for all data-parallel ranks; None = each
        rank plans for itself. `ahead`: returns the KV tokens that requests in progress outside a part will need for
        their output. `mixes`: a batch can carry rows of streams. `receipts`: notified of each decision."""
        self._scheduler, self._core, self._ranks, self._stock = scheduler, core, ranks, stock
        self._group, self._ahead, self._mixes, self._receipts = group, ahead, mixes, receipts
        self.adder: Any = None
        """Factory of the PrefillAdder while SGLang builds from a part; None at other times."""
        self.waiting: list[Any] = scheduler.waiting_queue
        """All waiting requests, as of the last build. During a build, SGLang's queue does not show all."""
        self.joined: list[Any] = []
        """Requests that SGLang queued during a build because others preempted them. No plan has seen them yet."""
        self.begun: list[Any] = []
        """Prompts in progress at the last plan. During a build, the slot does not show which prompts these are."""
        self.batched: list[Any] = []
        """Requests of the batch that is being built."""
        self.note_lack: Callable[[int], None] = lambda _: None
        """Called with the KV tokens that the first long request of the batch lacks; 0: it lacks rows."""
        # SGLang's builder logs the waiting tokens but sees only a part of the queue, so _built counts them afterwards.
        # Parked prompts count together with the prompt in the slot.
        self._loads: Any = replace(
            scheduler.load_inquirer,
            get_waiting_queue=lambda: scheduler.waiting_queue if self.adder is None else [],
            get_chunked_req=lambda: core.chunked.in_progress(scheduler.chunked_req),
        )
        scheduler.load_inquirer = self._loads
        self._sorts_by_priority = (
            scheduler.policy.enable_priority_scheduling and scheduler.policy.policy != CacheAgnosticPolicy.FCFS
        )
        # The plan decides when rows are mixed (see ``build_part``), also with --enable-mixed-chunk.
        scheduler.is_mixed_chunk = False

    def build(
        self, running_batch: ScheduleBatch, paused: Paused | None = None, *, beside: bool = False
    ) -> NextBatchPlan:
        """Decide on a batch and build it. `paused`: batch paused meanwhile. `beside`: a step of all ranks is paused."""
        sched, core, beside = self._scheduler, self._core, beside or paused is not None
        self.joined = []
        self._take_in_grammars(beside)
        queues = core.view_queues(sched.waiting_queue, sched.chunked_req)
        self.begun = queues.begun
        if core.decode is not None:
            tokens = context(running_batch) if self._mixes else None
            count = self._count_streams(running_batch) + core.rows_under_way
            core.decode.set_streams(time.perf_counter(), count, tokens)
        plan = self._plan(queues, paused)
        core.apply_plan(plan)
        built = batch = None
        for part in core.parts(plan, queues, beside=beside):
            built, cut = self.build_part(part, running_batch)
            running_batch, batch = built.running_batch, built.batch_to_run
            if batch is not None:
                self._record_build(part, batch, plan, cut, queues.begun)
                break
        if self._receipts is not None:
            joint, done = self._group is not None, batch is not None
            self._receipts.record_decision(plan, queues, paused=beside, joint=joint, built=done)
        return built or self.build_part(Part(SHORT, []), running_batch)[0]

    def _take_in_grammars(self, beside: bool) -> None:
        """Queue the requests whose grammars are ready, as SGLang's builder does: here the plan and the limit of
        --max-queued-requests see the whole queue."""
        manager: Any = self._scheduler.grammar_manager
        if not manager.has_waiting_grammars():
            return
        # In a pause SGLang only looks, which neither takes time nor counts as a wait for them.
        with temporarily(manager, SGLANG_GRAMMAR_POLL_INTERVAL=LOOK_S) if beside else nullcontext():
            ready = manager.get_ready_grammar_requests()
        for req in manager.grammar_queue if beside else ():
            req.grammar_wait_ct -= 1
        for req in ready:
            self._scheduler._add_request_to_queue(req)

    def _count_streams(self, running: ScheduleBatch) -> int:
        """Return the number of streams that may step. A lone stream waits if it would take memory that prompts in
        progress need: SGLang aborts a lone stream that lacks memory. Of several streams it would retract some."""
        sched, count = self._scheduler, streams(running)
        reserve = self._core.reserve(Part(SHORT, []), sched.chunked_req) if count == 1 else 0
        if not reserve:
            return count
        budget = sched.token_to_kv_pool_allocator.create_prefill_budget(sched.tree_cache)
        return int(budget.remaining_total >= running.new_tokens_required_next_decode() + reserve)

    def _plan(self, queues: Queues, paused: Paused | None) -> Plan:
        """Return the plan of this round. The leading rank decides; every rank gets the same plan."""
        core, now, plan = self._core, time.perf_counter(), Plan(())
        idle = not (queues.short or queues.long or paused)
        joint = self._group.plan(now, queues) if self._group else None
        if self._ranks.leader and idle:
            core.record_empty_queue(now)
        elif self._ranks.leader and joint is None:
            sched = self._scheduler
            sent = sched.disagg_prefill_inflight_queue if core.decode is None else []
            frees = bool(sent if core.decode is None else core.decode.streams)
            plan = core.decide(now, queues, paused, frees_memory=frees, sent=sent)
        core.classes.new_shorts = 0
        return joint or plan if idle else self._ranks.agree(joint or plan)

    def build_part(self, part: Part, running_batch: ScheduleBatch | None) -> tuple[NextBatchPlan, Req | None]:
        """Return the batch that SGLang builds from the part, and the prompt that is cut and goes on after the batch."""
        sched, core = self._scheduler, self._core
        joined = len(self.joined)
        waiting, held, full_chunk = sched.waiting_queue, sched.chunked_req, sched.chunked_prefill_size
        make = ShortPrefillAdder if part.cls == SHORT else WholePrefillAdder if part.whole else LapsPrefillAdder
        limit = None if part.whole else part.limit(core.unit, core.page)
        # Short requests wait for memory as in stock SGLang.
        self.note_lack = note_lack = self._note_lack if part.cls == LONG else lambda _: None
        rows = streams(running_batch) if part.carries and running_batch is not None else 0
        if part.tokens and part.cls == LONG and full_chunk and not getattr(sched, "enable_staging", False):
            sched.chunked_prefill_size = min(part.tokens + rows, full_chunk)
        reserve, least = core.reserve(part, held) + self._ahead(part), self._ranks.min_divisible_tokens
        unit = 0 if core.decode is None else core.unit
        if core.decode is not None and running_batch is not None:
            # The flag says that the previous part did not fit; this is another part.
            running_batch.batch_is_full = False
        adder = partial(make, core.classes, note_lack, reserve=reserve, limit=limit, least=least, unit=unit)
        core.considered, self.batched = False, []

        def considering(*args: Any, **kwargs: Any) -> LapsPrefillAdder:
            core.considered = True
            made = adder(*args, **kwargs)
            self.batched = made.can_run_list
            return made

        self.adder = considering
        self.waiting = waiting
        sched.waiting_queue, sched.chunked_req = list(part.queue), part.slot
        try:
            # SGLang mixes the running batch into a prefill batch as with --enable-mixed-chunk. It looks at the requests
            # that wait for their grammars in each call: a request would be queued behind the plan. And pipeline stages
            # tell each other only once a round which grammars are ready. With priorities SGLang would sort the part by
            # arrival.
            with (
                temporarily(sched, is_mixed_chunk=rows > 0),
                temporarily(sched.grammar_manager, grammar_queue=[]),
                temporarily(sched.policy, enable_priority_scheduling=self._sorts_by_priority),
            ):
                built = self._stock(running_batch)
        finally:
            self.adder = None
            sched.chunked_prefill_size = full_chunk
            cut, sched.chunked_req = sched.chunked_req, held
            sched.waiting_queue = core.remove_batched(part, waiting, sched.waiting_queue)
            sched.waiting_queue.extend(self.joined[joined:])
        if part.whole and cut is not None:
            raise RuntimeError(f"LAPS: {cut.rid} was cut in a batch of whole requests")
        return built, cut

    def _note_lack(self, tokens: int) -> None:
        """Record that the first long prompt found too little memory, unless the prompt exceeds even an empty pool."""
        self._core.lacking = tokens < self._scheduler.max_total_num_tokens

    def _record_build(self, part: Part, batch: ScheduleBatch, plan: Plan, cut: Req | None, begun: list[Req]) -> None:
        sched = self._scheduler
        flight = self._core.record_build(part, batch, plan, cut, begun, time.perf_counter())
        if self._group is not None:
            self._group.record_build(flight)
        if not part.whole:
            sched.chunked_req = cut
        if batch.prefill_stats is not None:
            chunk = 0 if cut is None else cut.extend_len
            batch.prefill_stats.num_pending_tokens = self._loads._get_num_pending_tokens(chunk_deduct=chunk)


def streams(running: ScheduleBatch) -> int:
    """Return the number of requests that a decode step of this batch would serve."""
    return 0 if running.is_prefill_only else len(running.reqs)


def context(running: ScheduleBatch) -> int | None:
    """Return the total tokens of the running batch; None if its rows cannot be mixed into a prefill batch, for example
    because a request returns log-probabilities. SGLang mixes hidden states, but returns them like those of a prompt."""
    lens, returns = running.seq_lens_cpu, running.return_logprob or running.return_hidden_states
    if lens is None or returns or any(r.beam_group is not None for r in running.reqs):
        return None
    return int(lens.sum())
