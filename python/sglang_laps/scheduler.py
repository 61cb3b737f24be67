"""SGLang's prefill scheduler with LAPS: overrides of a few lines each. ``core`` and ``builder`` do the work."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from laps_core.config import LapsConfig
from sglang.srt.disaggregation.utils import DisaggregationMode, is_aborted

from sglang_laps import beams, compat, graphs, penalties, seams
from sglang_laps.passes.cutter import stand_in_status
from sglang_laps.start import Laps, why_off
from sglang_laps.telemetry import counters
from sglang_laps.telemetry.receipts import LapsOutputStreamer, answer_query
from sglang_laps.telemetry.status import off, snapshot
from sglang_laps.temporarily import temporarily

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
    from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler as Stock
else:
    Stock = object  # the class that the mixin extends, see scheduler_class

logger = logging.getLogger(__name__)


class LapsPrefillMixin(Stock):  # type: ignore[misc]
    """Length-aware prefill scheduling, mixed in before SGLang's Scheduler."""

    laps_config: LapsConfig
    laps: Laps | None = None
    """None if LAPS is off: every method here then does what SGLang's does; the status also gives the reason."""
    laps_off_reason: str | None = None
    chunked_req: Req | None
    waiting_queue: list[Req]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seams.require_applied()
        super().__init__(*args, **kwargs)
        self.laps_off_reason = why_off(self, super().get_prefill_adder_class())
        if self.laps_off_reason:
            logger.warning("LAPS scheduler is off: %s.", self.laps_off_reason)
        else:
            self.laps = Laps(self, self.laps_config, super().get_new_batch_prefill)
            if isinstance(self.output_streamer, LapsOutputStreamer):
                self.output_streamer.receipts = self.laps.receipts

    # -- one round

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        """Build the next prefill batch as LAPS plans it."""
        if self.laps is None or self.disaggregation_mode == DisaggregationMode.DECODE:
            return super().get_new_batch_prefill(running_batch)
        return self.laps.builder.build(running_batch)

    def get_prefill_adder_class(self) -> Any:
        """Return the adder class for the batch that is being built, or SGLang's."""
        made = self.laps and self.laps.builder.adder
        return made or super().get_prefill_adder_class()

    def ingest_requests(self, stop_at_pause: bool = False) -> Any:
        """Receive requests as late as the decision on the next batch allows. While a short batch is held, return a list
        that is not empty: else the overlap loop asks for no batch before the running batch is done."""
        late = self.laps and self.laps.late
        early = late.wait(partial(super().ingest_requests, stop_at_pause)) if late else []
        received = super().ingest_requests(stop_at_pause)
        if self.laps is None:
            return received
        if late:
            late.record_start()
            received = [*early, *received]
        self.laps.ranks.keep_received(received)
        return received or ([None] if self.enable_overlap and self.laps.core.asks_again else received)

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """Dispatch received requests. On a later pipeline stage, take out the plan that came with the requests."""
        super().process_input_requests(recv_reqs if self.laps is None else self.laps.ranks.take_plan(recv_reqs))

    def process_prefill_chunk(self, last_batch: ScheduleBatch | None, running_batch: ScheduleBatch) -> None:
        """Cache and send the chunk that ran last, once: a parked prompt has nothing new to send."""
        sent = False
        if self.laps is not None:
            if self.laps.ranks.stages > 1:
                # SGLang's loop for pipelines does not do this: there an aborted prompt runs to its end.
                self.process_pending_chunked_abort()
            chunked = self.laps.core.chunked
            chunked.parked = list(filter(self._laps_wanted, chunked.parked))
            sent = not chunked.take_unsent() and self.chunked_req is not None
            if sent and not self._laps_wanted(self.chunked_req):
                self.chunked_req = None
        with temporarily(self, chunked_req=None) if sent else nullcontext():
            super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)

    def _laps_wanted(self, req: Any) -> bool:
        """Return False once no decode server will take a prompt that started before its decode server was known: the
        prompt has then been answered and its memory is free."""
        return not req.pending_bootstrap or self.check_bootstrap(req) or not is_aborted(req)

    # -- SGLang's view of paused batches and parked prompts

    def _collect_inflight_batches(self) -> list[ScheduleBatch | None]:
        """Return SGLang's batches, paused batches and parked prompts: their requests can be aborted and time out."""
        batches: list[Any] = super()._collect_inflight_batches()
        if self.laps is None:
            return batches
        return [*batches, *self.laps.pauses.in_flight(), self.laps.core.chunked.in_progress(self.chunked_req)]

    def can_schedule_lora_req(self, req: Req, running_loras: set[str | None]) -> bool:
        """Return True if the request's LoRA adapter fits beside the adapters that must stay loaded."""
        if self.laps is not None:
            running_loras = running_loras | self.laps.pauses.adapters_in_use()
        return super().can_schedule_lora_req(req, running_loras)  # type: ignore[no-any-return]

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        """Return True if nothing runs, waits, or is parked."""
        idle: bool = super().is_fully_idle(*args, **kwargs)
        return idle if self.laps is None else idle and not (self.laps.core.chunked.parked or self.laps.core.under_way)

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort requests; a parked prompt once that is safe."""
        super().abort_request(recv_req)
        if self.laps is not None:
            self.laps.core.chunked.abort(recv_req.rid, every=recv_req.abort_all)

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        """Pause. If SGLang retracts all running requests, retract the parked prompts, too."""
        colocated = self.laps and recv_req.mode == "retract" and self.laps.colocated
        if colocated:
            # Otherwise SGLang would queue an aborted prompt again, and prefill it.
            self.process_pending_chunked_abort()
        super().pause_generation(recv_req)
        if self.laps is not None:
            self.cur_batch_for_debug = None  # else SGLang's watchdog ends the server if no batch runs for long
        if colocated:
            colocated.retract_rest()

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        """Queue a request. A retracted request waits anew, with all tokens to be computed again. A request that comes
        while a batch is built waits for the next plan."""
        if self.laps is not None and beams.end_if_lost(self, req):
            return
        if self.laps is not None and self.laps.colocated:
            req.laps_tag = None
        if self.laps is None or self.laps.builder.adder is None:
            super()._add_request_to_queue(req, is_retracted)
            return
        with temporarily(self, waiting_queue=self.laps.builder.joined):
            super()._add_request_to_queue(req, is_retracted)

    def process_pending_chunked_abort(self) -> None:
        """End the aborted prompt in the slot, as SGLang does, and then each aborted parked prompt."""
        super().process_pending_chunked_abort()
        chunked = None if self.laps is None else self.laps.core.chunked
        for req in chunked.aborted() if chunked else ():
            if req is self.chunked_req:
                self._pending_chunked_abort_req = req
                super().process_pending_chunked_abort()
            elif chunked and req in chunked.parked:
                with temporarily(self, chunked_req=req, _pending_chunked_abort_req=req):
                    super().process_pending_chunked_abort()
                chunked.parked.remove(req)

    # -- batches on the device

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        """Run a batch, in slices if the plan asks for slices."""
        flight = None if self.laps is None else self.laps.core.take_next()
        if self.laps is not None and flight is None and self.laps.group is not None and not batch.reqs:
            flight = self.laps.core.idle(batch)
        if self.laps is None or flight is None:
            with self.laps.steps.running(batch) if self.laps and self.laps.steps else nullcontext():
                result = super().run_batch(batch, *args, **kwargs)
            if self.laps and self.laps.late and self.laps.core.step and not self.laps.core.under_way:
                self.laps.late.record_launch()
            return result
        if self.laps.colocated:
            penalties.recount(batch)
        runner = self.tp_worker.model_runner
        replays = graphs.replays(runner)
        flight.started = time.perf_counter()
        if self.laps.receipts is not None and flight.reqs:
            self.laps.receipts.record_start(flight)
        begin = self.laps.marks and self.laps.marks.now()
        with self.laps.pauses.slicing(flight):
            result = super().run_batch(batch, *args, **kwargs)
        if self.laps.late and not flight.layers and not flight.within:
            self.laps.late.record_launch()
        if self.laps.marks:
            flight.marks = begin, self.laps.marks.now()
        if self.laps.synchronous:
            # The overlap loop runs the next batch before it processes the result of this batch.
            flight.done = time.perf_counter()
        flight.stock = bool(flight.reqs) and graphs.replays(runner) == replays and not flight.abandoned
        if flight.reqs or flight.within:
            self.laps.core.record_launch(batch, flight)
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Process a result and record the device time of its batch."""
        if self.laps is None:
            super().process_batch_result(batch, result)
            return
        if self.laps.pauses.processed(result):
            return
        core = self.laps.core
        if self.laps.steps:
            self.laps.steps.record_result(batch, result)
        flight = core.flight_of(batch)
        if flight is not None and self.laps.marks and self.laps.ranks.stages > 1:
            # The result comes when the last stage is done, long after this one.
            flight.took_s = self.laps.marks.seconds(*flight.marks)
        elif flight is not None and flight.done is None and result.copy_done is not None:
            # SGLang's method waits for the same event first; its work after that is not part of the step.
            result.copy_done.synchronize()
            flight.done = time.perf_counter()
            if self.laps.marks:
                # A batch that was launched behind other batches started when these had ended.
                flight.started = flight.done - self.laps.marks.seconds(*flight.marks)
        # SGLang asks the slot whether a cut prompt goes on.
        parked = flight is not None and flight.cut in core.chunked.parked
        receipts, busy_us = self.laps.receipts, self.total_prefill_busy_us
        slot = temporarily(self, chunked_req=flight.cut) if parked and flight else nullcontext()
        with slot, nullcontext() if receipts is None else receipts.result_of(flight):
            super().process_batch_result(batch, result)
        if flight is not None:
            now = time.perf_counter()
            core.record_result(flight, now)
            counters.correct(self, flight, busy_us)
            self._laps_update_series(now, core.totals)
            if self.laps.group is not None:
                self.laps.group.record_result(flight)

    def on_idle(self) -> None:
        """Do SGLang's idle housekeeping; update the gauges and save the latency model if due."""
        if self.laps is not None:
            now = time.perf_counter()
            self._laps_update_series(now)
            self.laps.saver.when_due(now)
        super().on_idle()

    # -- receipts

    def get_output_streamer_class(self) -> Any:
        """Return the streamer that sends receipts, if receipts are kept and no other streamer is in use."""
        stock = super().get_output_streamer_class()
        plain = stock is LapsOutputStreamer.__base__ and self.rust_server is None
        return LapsOutputStreamer if plain and self.laps_config.receipts else stock

    def send_abort_output(self, abort_req: AbortReq, req: Req) -> None:
        """Record a receipt, and tell the client that its waiting request was aborted."""
        if self.laps is not None and self.laps.receipts is not None:
            self.laps.receipts.record_abort(req)
        super().send_abort_output(abort_req, req)

    # -- status

    def _laps_update_series(self, now: float, totals: Any = None) -> None:
        """Update the Prometheus series if this rank serves them. `totals`: counters by class, if one has changed."""
        if self.laps is not None and self.laps.series is not None:
            self.laps.series.update(now, self.laps_status, totals or {})

    def get_internal_state(self, recv_req: Any) -> Any:
        """Answer a query for receipts, or return SGLang's internal state with the entry "laps" for /laps_status."""
        if self.laps is not None and (answer := answer_query(recv_req, self.laps.receipts)) is not None:
            return answer
        output = super().get_internal_state(recv_req)
        output.internal_state["laps"] = self.laps_status()
        return output

    def laps_status(self) -> dict[str, Any]:
        if self.laps is None:
            said = off(self.laps_config, self.laps_off_reason)
        else:
            said = snapshot(self, self.laps_config, self.laps.core, self.laps.slices)
            said["dp_rank"] = self.laps.dp_rank
            said["group"] = {**self.laps.together, **(self.laps.group.status() if self.laps.group else {})}
        return {**said, **stand_in_status(self)}


def scheduler_class(stock: type, config: LapsConfig) -> type:
    """Return the subclass of SGLang's Scheduler that LAPS puts in its place."""
    # Code that looks for SGLang's own class (``seams``) finds the class by __wrapped__.
    return type(
        "LapsScheduler", (LapsPrefillMixin, *compat.bases(), stock), {"laps_config": config, "__wrapped__": stock}
    )
