"""What happens between two slices of a long batch: requests and finished transfers are taken in, and what may preempt
runs as a whole batch.

All of it inside the forward pass of the paused batch. So the rest of SGLang sees one batch that runs for long, and what
it must not do to a running batch (flush, pause, new weights) waits for its end, as it does for any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    CloseSessionReqInput,
    ConfigureLoggingReq,
    FreezeGCReq,
    GetInternalStateReq,
    OpenSessionReqInput,
    ProfileReq,
    TokenizedGenerateReqInput,
)

from sglang_laps.builder import Builder
from sglang_laps.core import Flight, LapsCore
from sglang_laps.ranks import Ranks
from sglang_laps.slices import Cutter

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

AT_ONCE = (
    *(TokenizedGenerateReqInput, BatchTokenizedGenerateReqInput, AbortReq, GetInternalStateReq),
    *(OpenSessionReqInput, CloseSessionReqInput, ProfileReq, ConfigureLoggingReq, FreezeGCReq),
)
"""What may be dispatched while a batch is paused: it touches neither weights nor a running batch, nor needs a server
that is idle. Anything else, and all that came after it, waits for its end."""


class Interlude:
    """The pauses of one scheduler's long batches."""

    def __init__(
        self, scheduler: Scheduler, core: LapsCore, builder: Builder, ranks: Ranks, cutter: Cutter | None
    ) -> None:
        """`cutter` None = there are no pauses."""
        self._scheduler, self._core, self._builder, self._ranks = scheduler, core, builder, ranks
        self._cutter = cutter
        self._processed: dict[int, Any] = {}

    @contextmanager
    def slicing(self, flight: Flight) -> Iterator[None]:
        """Run this batch in slices, if it is to be."""
        if not flight.layers or self._cutter is None:
            yield
            return
        self._core.under_way.append(flight)
        try:
            with self._cutter.cut(flight.layers, partial(self._pause, flight, self._cutter.layers)):
                yield
        finally:
            self._core.under_way.remove(flight)
            self._core.pacer.sizes.launch_s = self._cutter.launch_s

    def _pause(self, flight: Flight, layers: int, layers_left: int) -> bool:
        """Between two slices of `flight`, of `layers` in all; whether anything else ran on the device."""
        sched = self._scheduler
        ran = False
        # The forward pass has its own stream; what is scheduled belongs on the other.
        with sched.device_module.StreamContext(sched.schedule_stream):
            self._results_so_far()
            self._take_in()
            while True:
                built = self._builder.build(sched.running_batch, self._core.paused(flight, layers_left, layers))
                if built.batch_to_run is None:
                    break
                ran, sched.running_batch = True, built.running_batch
                batch = built.batch_to_run
                if batch.hicache_consumer_index < 0:
                    # A prefix that it found on the device may still be on its way there from the host, for the paused
                    # batch. Loads of its own would come after those.
                    batch.hicache_consumer_index = flight.batch.hicache_consumer_index
                self._run(batch)
        if ran:
            # Which of the layer-wise loads to wait for is one number of the worker.
            sched.tp_worker.set_hicache_consumer(flight.batch.hicache_consumer_index)
        return ran

    def processed(self, result: Any) -> bool:
        """Whether this result was processed in a pause already; asked once, by the event loop."""
        return self._processed.pop(id(result), None) is not None

    def _take_in(self) -> None:
        """New requests, those whose decode server is ready, and answers whose transfer is done."""
        sched = self._scheduler
        deferred = sched._deferred_input_requests
        ours = []
        if not deferred and self._ranks.leader:
            ours = sched._poll_timeout_aborts()
        deferred.extend(sched.request_receiver.recv_requests(local_reqs=ours))
        n = next((i for i, r in enumerate(deferred) if not isinstance(r, AT_ONCE)), len(deferred))
        now, deferred[:n] = deferred[:n], []
        sched.process_input_requests(now)
        sched.waiting_queue.extend(sched.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        sched.resolve_waiting_queue_bootstrap()
        sched.process_disagg_prefill_inflight_queue()

    def _results_so_far(self) -> None:
        """Results of batches before the paused one are due by now: their first tokens need not wait for it.

        The event loop takes them from its queue later, and is told then.
        """
        if not self._scheduler.enable_overlap:
            return
        for batch, result in list(self._scheduler.result_queue):
            if id(result) not in self._processed:
                self._scheduler.process_batch_result(batch, result)
                self._processed[id(result)] = result

    def _run(self, batch: Any) -> None:
        sched = self._scheduler
        batch = sched.ngram_embedding_manager.prepare_for_forward(batch, chunked_req=None)
        if sched.enable_staging:
            sched.maybe_prefetch_staging_for_batch(batch)
        result = sched.run_batch(batch)
        if sched.enable_overlap:
            sched._apply_war_barrier()
            sched.launch_batch_sample_if_needed(result, batch)
        sched.process_batch_result(batch, result)
        sched.process_disagg_prefill_inflight_queue()
