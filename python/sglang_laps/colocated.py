"""Servers that prefill and decode: in the pauses of a long batch run decode steps, and short batches whose requests
then stream along. A batch in one piece may have a row of each stream: then it is both.

All else is as on a prefill server (``pauses``). To the rest of SGLang it is one prefill batch that takes long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from laps_core.policy.types import Paused
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT, retract_all
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.runtime_context import get_exec, get_parallel

from sglang_laps import group, no_slices
from sglang_laps.builder import streams
from sglang_laps.core import LapsCore
from sglang_laps.flights import Flight, Part
from sglang_laps.pauses import Pauses
from sglang_laps.stand_in import device_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


COORDINATION = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"
"""With it ranks draft and verify in a step in which others prefill."""


def why_not(scheduler: Scheduler) -> str | None:
    """Why LAPS leaves a server that prefills and decodes alone, or None. The same on every rank."""
    alone = group.why_not(scheduler)
    if scheduler.is_generation and alone and (reason := no_slices.why_not(scheduler, device_of(scheduler))):
        return f"no decode step could run in a long prefill: {reason}"
    drafts = not scheduler.spec_algorithm.is_none()
    checks = (
        (scheduler.model_config.is_encoder_decoder, "an encoder-decoder model"),
        (scheduler.decode_offload_manager is not None, "KV caches of streams are offloaded"),
        (alone is None and _coordinates() and drafts, COORDINATION),
    )
    return next((f"{what}: not supported without disaggregation" for hit, what in checks if hit), None)


def _coordinates() -> bool:
    flag = getattr(envs, COORDINATION, None)  # SGLang 0.5.22 has none
    return flag is not None and bool(flag.get())


def ahead(scheduler: Scheduler, core: LapsCore, part: Part) -> int:
    """KV tokens that prompts in progress and in paused batches will need for what they answer, as SGLang estimates it
    of those that are decoded already."""
    begun = [*core.chunked.in_progress(scheduler.chunked_req).reqs, *(r for f in core.under_way for r in f.reqs)]
    ratio = scheduler.new_token_ratio_tracker.current

    def tokens(req: Any) -> float:
        left = min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
        return float(left * (1.0 if req.sampling_params.ignore_eos else ratio))

    return int(sum(tokens(r) for r in {id(r): r for r in begun}.values() if r is not part.slot))


def mixes(scheduler: Scheduler) -> bool:
    """Return True if SGLang can mix rows of streams into a prefill batch, as with ``--enable-mixed-chunk``. Where it
    cannot, streams have steps of their own alone. The same on every rank."""
    execution = get_exec()
    refused = (
        # Ranks that plan together count no rows.
        group.why_not(scheduler) is None,
        # A row has no draft.
        not scheduler.spec_algorithm.is_none(),
        execution.kernel.dsa_prefill_backend == "flashmla_sparse_q8",
        execution.features.enable_encoder_swa_bounded_replay,
        getattr(get_parallel(), "enable_megamoe_for_layernorm_sp", False),
        scheduler.device == "npu",
    )
    return not any(refused)


def _ends_early(req: Any) -> bool:
    """Return True if an aborted request needs nothing of the pass that it is in."""
    plain = req.session is None and req.beam_group is None and not req.return_sampling_mask
    return plain and isinstance(req.to_finish, FINISH_ABORT)


class Colocated(Pauses):
    """The pauses of one scheduler that decodes, too."""

    def retract_parked(self) -> None:
        """Prompts between two chunks begin anew: the server pauses for new weights, say."""
        sched, parked = self._scheduler, self._core.chunked.take_parked()
        if not parked:
            return
        retract_all(
            reqs=parked,
            req_to_token_pool=sched.req_to_token_pool,
            token_to_kv_pool_allocator=sched.token_to_kv_pool_allocator,
            tree_cache=sched.tree_cache,
            hisparse_coordinator=None,
            offload_kv=False,
        )
        for req in parked:
            sched._add_request_to_queue(req)

    def adapters_in_use(self) -> set[str | None]:
        """Also adapters of prompts in progress: streams may run in a pause of their next chunk."""
        return self.adapters() | {r.lora_id for r in self._builder.begun}

    # -- what differs in a pause

    def _nobody_waits(self, flight: Flight) -> bool:
        """All of its requests were aborted: it ends, and its memory is free as soon as the event loop has seen it."""
        batch = flight.batch
        # For these SGLang reads more of the output than the next tokens, or keeps the KV of an aborted request.
        if batch.return_logprob or batch.return_hidden_states or not all(map(_ends_early, flight.reqs)):
            return False
        for req in flight.reqs:
            # Its KV is no prefix of anybody's: some layers are missing.
            req.discard_output_reason = req.to_finish
        return True

    def _next(self, paused: Paused) -> Any:
        # Rows of the running batch may be mixed into a prefill batch.
        with self._no_results_queued():
            batch = super()._next(paused)
        return self._decode_step() if batch is None and self._core.decodes else batch

    def _launch(self, batch: Any) -> Any:
        # A verification first has grammars follow what is queued.
        with self._no_results_queued():
            return super()._launch(batch)

    def _goes_on(self) -> bool:
        return True

    def _polls(self) -> list[Any]:
        return []

    def _moves_on(self) -> None:
        """Nobody waits for another server."""

    def _settled(self, batch: Any) -> None:
        """Requests of a prefill batch stream along from now on: the event loop merges the paused batch alone."""
        if not batch.forward_mode.is_extend():
            return
        batch.filter_batch()
        running = self._scheduler.running_batch
        if running.is_empty():
            batch.batch_is_full = False
            self._scheduler.running_batch = batch
        elif not batch.is_empty():
            running.merge_batch(batch)

    def _decode_step(self) -> Any:
        """The running batch, ready for a step, or None."""
        running = self._scheduler.running_batch
        running.filter_batch()
        if not streams(running) or (len(running.reqs) == 1 and not running.check_decode_mem()):
            # SGLang would abort the last one, though the paused batch will give memory back.
            return None
        with self._no_results_queued():
            batch = self._scheduler.update_running_batch(running)
        return None if batch is None or batch.is_empty() else batch

    @contextmanager
    def _no_results_queued(self) -> Iterator[None]:
        """Results that are queued count for whoever ends by them, and for grammars. All of them are processed
        already."""
        sched = self._scheduler
        if not sched.enable_overlap:
            yield
            return
        queued, sched.result_queue = sched.result_queue, deque()
        try:
            yield
        finally:
            sched.result_queue = queued
