"""Work between two slices of a long batch: new requests and finished transfers are taken in, and a preempting batch can
run, always whole.

All of this happens inside the forward pass of the paused batch. So the rest of SGLang sees one batch that runs for
long, and operations that must not touch a running batch (pause, new weights) wait for its end (``messages``).

This module decides nothing: ``Pacer.plan`` chooses the preempting batch, or ``laps_core.group.slices`` with
data-parallel attention.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from laps_core.policy.types import Paused
from sglang.srt.observability.req_time_stats import set_schedule_time_batch

from sglang_laps import messages
from sglang_laps.builder import Builder
from sglang_laps.core import LapsCore
from sglang_laps.flights import Flight
from sglang_laps.group import Group
from sglang_laps.passes import host_loads, put_back
from sglang_laps.passes.cutter import Abandoned, Cutter
from sglang_laps.ranks import Ranks

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

POLL_S = 0.01
"""KV senders are polled in the first pause after this time (seconds) since the last poll, and in a pause with new
messages. A poll costs about as much as the rest of a pause, and more with several ranks."""
COPIES_EVERY = 4
"""Pauses per look at copies of the host tier. Several ranks look together, at the cost of the rest of a pause."""
POLL_SHARE = 0.05
"""Most of the time that polls may take. A poll visits each request that waits or is transferred."""
FEW = 256
"""Most requests that wait or are transferred with which a poll costs no more than a pause."""


class PollTransfers:
    """Message from the leading rank, sent to all ranks with the requests: every rank polls KV senders in this pause."""


class Pauses:
    """Pauses of one scheduler's long batches."""

    def __init__(
        self,
        scheduler: Scheduler,
        core: LapsCore,
        builder: Builder,
        ranks: Ranks,
        cutter: Cutter | None,
        *,
        synchronous: bool,
        group: Group | None = None,
    ) -> None:
        """`cutter`: None = no pauses. `synchronous`: a forward pass is complete when its call returns. `group`: the
        data-parallel ranks that pause together."""
        self._group = group
        self._scheduler, self._core, self._builder, self._ranks = scheduler, core, builder, ranks
        self._cutter, self._synchronous = cutter, synchronous
        self._processed: dict[int, Any] = {}
        self._launched: tuple[Any, Any] | None = None
        self._pauses = 0
        self._polls_s = 0.0
        """Time of the next poll of the other servers."""
        if scheduler.enable_lora:
            manager = scheduler.tp_worker.model_runner.lora_manager
            manager.fetch_new_loras = partial(self._fetch, manager.fetch_new_loras)

    @contextmanager
    def slicing(self, flight: Flight) -> Iterator[None]:
        """Run the enclosed forward pass in slices if the plan asks for slices."""
        prefills = bool(flight.reqs) or flight.batch.is_extend_in_batch
        if self._group is not None and (parts := self._group.start_step(prefills=prefills)):
            with self._together(self._group, flight, parts):
                yield
            return
        if not flight.layers or self._cutter is None:
            yield
            return
        try:
            with self._core.slicing(flight):
                with self._cutter.cut(flight.layers / flight.parts, partial(self._pause, flight, self._cutter.layers)):
                    yield
                self._process_last_result()
        finally:
            sizes = self._core.pacer.sizes
            sizes.launch_s, sizes.pause_s = self._cutter.launch_s, self._cutter.pause_s

    @contextmanager
    def _together(self, group: Group, flight: Flight, parts: int) -> Iterator[None]:
        """Run the enclosed step of all data-parallel ranks in `parts` slices on each rank."""
        if parts == 1 or self._cutter is None:
            yield
        else:
            with self._core.slicing(flight):
                with self._cutter.cut(0.0, partial(self._pause_together, group, flight), parts):
                    yield
                self._process_last_result()
        group.record_slice()

    def _pause_together(self, group: Group, flight: Flight, layers_left: float) -> bool:
        """Do the work of one pause of a step of all ranks, on every rank. Return True if another step ran."""
        sched, batch = self._scheduler, None
        with sched.device_module.StreamContext(sched.schedule_stream):
            self._process_last_result()
            self._process_queued_results()
            self._take_in_host_copies()
            group.record_slice()
            self._receive_messages()
            if group.may_preempt:
                built = self._builder.build(sched.running_batch, beside=True)
                sched.running_batch = built.running_batch
                # A rank without work gets an idle batch if another rank has work.
                batch = sched.dp_attn_adapter.maybe_prepare_mlp_sync_batch(built.batch_to_run)
            if batch is not None:
                self._launch_in_pause(batch)
                if self._synchronous:
                    self._process_last_result()
        if batch is not None:
            self._restore_paused(flight)
        return batch is not None

    def _pause(self, flight: Flight, layers: int, layers_left: float) -> bool:
        """Do the work of one pause of `flight`, whose pass has `layers` layers. Return True if another batch ran on the
        device. Raises Abandoned if all requests of the paused batch were aborted."""
        sched = self._scheduler
        ran = ends = False
        # The forward pass has its own stream; scheduling belongs on SGLang's schedule stream.
        with sched.device_module.StreamContext(sched.schedule_stream):
            self._process_last_result()
            self._process_queued_results()
            self._take_in_host_copies()
            self._receive_messages()
            ends = self._cutter is not None and self._cutter.abandons and self._discard_if_all_aborted(flight)
            done = ends or messages.stop(sched._deferred_input_requests)
            while not done and (batch := self._next(self._core.paused(flight, layers_left, layers))) is not None:
                batch = sched.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
                ran = True
                self._launch_in_pause(batch)
                if not self._synchronous and self._resumes_before_result():
                    break  # the device goes on with the next slice while this result is processed
                self._process_last_result()
        if ends:
            host_loads.wait_for_load(sched, flight.batch)
            flight.abandoned = True
            raise Abandoned
        if ran:
            self._restore_paused(flight)
        return ran

    def _launch_in_pause(self, batch: Any) -> None:
        if batch.hicache_consumer_index < 0:
            below = (f.batch for f in reversed(self._core.under_way))
            batch.hicache_consumer_index = host_loads.find_shared(self._scheduler, batch, below)
        set_schedule_time_batch(batch)
        # SGLang counts the time between the launches of two steps as that of a step; a slice ran since the last one.
        self._scheduler._sched_idled = True
        self._launched = batch, self._launch(batch)

    def _restore_paused(self, flight: Flight) -> None:
        """Restore the state of `flight`, which goes on after another batch ran."""
        sched = self._scheduler
        # The worker keeps a single number: the layer-wise load that a pass waits for.
        sched.tp_worker.set_hicache_consumer(flight.batch.hicache_consumer_index)
        put_back.wait_for_draft(sched.model_worker)
        if sched.enable_overlap:
            # SGLang keeps the tensors of only the newest two batches. The tensors of this batch must outlive its pass.
            sched.record_batch_in_overlap(flight.batch)

    def _discard_if_all_aborted(self, flight: Flight) -> bool:
        """Return False: a prefill server finishes the pass, because a decode server waits for each of its requests.
        Servers that decode can end it (``colocated``)."""
        return False

    def _next(self, paused: Paused) -> Any:
        """Return the batch that runs in this pause, or None."""
        built = self._builder.build(self._scheduler.running_batch, paused)
        if built.batch_to_run is not None:
            self._scheduler.running_batch = built.running_batch
        return built.batch_to_run

    def _resumes_before_result(self) -> bool:
        """Return True if the paused batch goes on before the result of the preempting batch is available."""
        return not self._scheduler.waiting_queue

    def in_flight(self) -> list[Any]:
        """Return the paused batches, and the batch that ran last in a pause if its result is not processed yet."""
        return [*(f.batch for f in self._core.under_way), *([self._launched[0]] if self._launched else [])]

    def adapters(self) -> set[str | None]:
        """Return the LoRA adapters of the paused batches, which must stay loaded."""
        return {r.lora_id for f in self._core.under_way for r in f.batch.reqs}

    def adapters_in_use(self) -> set[str | None]:
        """Return the adapters that must fit beside the adapters of a new batch and of the running batch."""
        return self.adapters()

    def _fetch(self, fetch: Any, new: set[Any], running: Any = ()) -> Any:
        # With data-parallel attention `new` has the adapters of all ranks; ``put_back`` loads the paused ones again.
        slots, kept = self._scheduler.tp_worker.model_runner.lora_manager.max_loras_per_batch, self.adapters()
        return fetch(new, {*running, *(kept if len({*new, *running, *kept}) <= slots else ())})

    def processed(self, result: Any) -> bool:
        """Return True if this result was already processed in a pause. The event loop asks once per result."""
        return self._processed.pop(id(result), None) is not None

    def _receive_messages(self) -> None:
        """Take in new messages. If any arrived, also update the requests that wait for other servers, unless there are
        many."""
        sched = self._scheduler
        deferred = sched._deferred_input_requests
        ours: list[Any] = []
        if self._ranks.leader:
            ours = [*([] if messages.holds(deferred) else sched._poll_timeout_aborts()), *self._make_poll_messages()]
        came = sched.request_receiver.recv_requests(local_reqs=ours)
        received = [r for r in came if not isinstance(r, PollTransfers)]
        deferred.extend(received)
        sched.process_input_requests(messages.take_ready(deferred, self.adapters))
        if came:
            self._poll_other_servers(due=len(received) < len(came))

    def _make_poll_messages(self) -> list[Any]:
        """Return the messages that the leading rank sends to all ranks with the requests."""
        return [PollTransfers()] if time.perf_counter() >= self._polls_s else []

    def _poll_other_servers(self, *, due: bool) -> None:
        """Take in requests whose decode server is ready, and finish requests whose KV transfer is done. If no poll is
        `due`, do so only for few requests."""
        sched, begin = self._scheduler, time.perf_counter()
        queues = sched.waiting_queue, sched.disagg_prefill_bootstrap_queue.queue, sched.disagg_prefill_inflight_queue
        # The ranks that poll together have equal queues.
        if not due and sum(map(len, queues)) > FEW:
            return
        sched.waiting_queue.extend(sched.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        sched.resolve_waiting_queue_bootstrap()
        sched.process_disagg_prefill_inflight_queue()
        end = time.perf_counter()
        self._polls_s = max(begin + POLL_S, end + (end - begin) / POLL_SHARE)

    def _process_queued_results(self) -> None:
        """Process the results of batches before the paused batch, so that their first tokens do not wait for its end.

        The event loop takes these results from its queue later, and skips them (``processed``).
        """
        if not self._scheduler.enable_overlap:
            return
        for batch, result in list(self._scheduler.result_queue):
            if id(result) not in self._processed:
                self._scheduler.process_batch_result(batch, result)
                self._processed[id(result)] = result

    def _take_in_host_copies(self) -> None:
        """Take in which copies of the host tier (HiCache) are done, as SGLang does before each batch. Until then the KV
        of requests that have ended is locked, and prompts wait for prefixes that are read from a storage."""
        self._pauses += 1
        if self._scheduler.enable_hierarchical_cache and self._pauses % COPIES_EVERY == 0:
            self._scheduler.tree_cache.check_hicache_events()

    def _launch(self, batch: Any) -> Any:
        """Launch a batch and return its result, which may not be complete yet."""
        sched = self._scheduler
        batch = sched.ngram_embedding_manager.prepare_for_forward(batch, chunked_req=None)
        if getattr(sched, "enable_staging", False):
            sched.maybe_prefetch_staging_for_batch(batch)
        result = sched.run_batch(batch)
        if sched.enable_overlap:
            sched._apply_war_barrier()
            sched.launch_batch_sample_if_needed(result, batch)
        return result

    def _process_last_result(self) -> None:
        """Process the result of the batch that ran last in a pause."""
        if self._launched is None:
            return
        (batch, result), self._launched = self._launched, None
        self._scheduler.process_batch_result(batch, result)
        self._follow_up(batch)

    def _follow_up(self, batch: Any) -> None:
        """Follow up on a batch whose result was processed in a pause."""
        self._scheduler.process_disagg_prefill_inflight_queue()
