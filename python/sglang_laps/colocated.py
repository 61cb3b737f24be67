"""Servers that prefill and decode. In the pauses of a long batch, decode steps run, and short batches whose requests
then become streams. A batch can also carry a row of each stream, and is a decode step, too; in its pauses run only
short batches.

Everything else is as on a prefill server (``pauses``). The rest of SGLang sees one prefill batch that takes long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from laps_core.policy.types import Paused
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT, retract_all
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.runtime_context import get_exec, get_parallel

from sglang_laps import group
from sglang_laps.builder import Builder, streams
from sglang_laps.chunked import InProgress
from sglang_laps.core import LapsCore
from sglang_laps.flights import Flight, Part
from sglang_laps.passes import no_slices
from sglang_laps.passes.cutter import device_of
from sglang_laps.pauses import Pauses
from sglang_laps.temporarily import temporarily

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


COORDINATION = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"
"""SGLang's variable that lets ranks draft and verify in a step in which other ranks prefill."""


def why_not(scheduler: Scheduler) -> str | None:
    """Return why LAPS is off on a server that prefills and decodes, or None. The same on every rank."""
    alone = group.why_not(scheduler)
    if scheduler.is_generation and alone and (reason := no_slices.why_not(scheduler, device_of(scheduler))):
        return f"no decode step could run in a long prefill: {reason}"
    drafts = not scheduler.spec_algorithm.is_none()
    coordination = getattr(envs, COORDINATION, None)  # not in SGLang 0.5.22
    checks = (
        (scheduler.model_config.is_encoder_decoder, "an encoder-decoder model"),
        (scheduler.decode_offload_manager is not None, "KV caches of streams are offloaded"),
        (alone is None and drafts and coordination is not None and coordination.get(), COORDINATION),
    )
    return next((f"{what}: not supported without disaggregation" for hit, what in checks if hit), None)


def started(core: LapsCore, prompts: Iterable[Any]) -> list[Any]:
    """Return `prompts`, which are in progress, and the requests of paused batches, also the streams that have a row,
    each once."""
    return list({id(r): r for r in (*prompts, *(r for f in core.under_way for r in f.batch.reqs))}.values())


def ahead(scheduler: Scheduler, core: LapsCore, part: Part) -> int:
    """Return the KV tokens that prompts in progress (without the one in `part`) and in paused batches will need for
    their output, by SGLang's estimate for requests that are being decoded."""
    begun = started(core, core.chunked.in_progress(scheduler.chunked_req).reqs)
    ratio = scheduler.new_token_ratio_tracker.current

    def tokens(req: Any) -> float:
        left = min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
        return float(left * (1.0 if req.sampling_params.ignore_eos else ratio))

    return int(sum(tokens(r) for r in begun if r is not part.slot))


def count_parked(scheduler: Scheduler, core: LapsCore) -> None:
    """Have SGLang's check of the KV memory between two batches (SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY) count the
    memory of parked prompts, which without a prefix cache would seem lost."""
    scheduler.invariant_checker = replace(
        scheduler.invariant_checker,
        get_running_batch=lambda: InProgress([*scheduler.running_batch.reqs, *core.chunked.parked]),
    )


@dataclass(frozen=True, slots=True)
class _Counted:
    """Requests given to SGLang instead of a batch. It reads them for each candidate, but only if there are beams."""

    parts: tuple[list[Any], ...]

    @property
    def reqs(self) -> list[Any]:
        return list(chain(*self.parts))


def count_rows(scheduler: Scheduler, core: LapsCore, builder: Builder) -> None:
    """Have SGLang count the requests of paused batches and parked prompts as running, and keep rows free for the beams
    of these and of the batch that is being built. A beam search takes a row per beam when its prompt is prefilled; the
    first long one for which too few are free is waited for, or others would take each row that becomes free."""
    count = scheduler.get_num_allocatable_reqs

    def count_all(running_bs: int, beam_width: int | None = None, running_batch: Any = None, **more: Any) -> int:
        others = [r for r in started(core, builder.begun) if r not in builder.batched]
        seen = _Counted(((running_batch or scheduler.running_batch).reqs, others, builder.batched))
        allowed = int(count(running_bs + len(others), beam_width, seen, **more))
        if beam_width is not None and allowed <= 0 and not builder.batched:
            builder.note_lack(0)
        return allowed

    scheduler.get_num_allocatable_reqs = count_all


def mixes(scheduler: Scheduler) -> bool:
    """Return True if SGLang can mix rows of streams into a prefill batch, as with ``--enable-mixed-chunk``. If not,
    streams only have steps of their own. The same on every rank."""
    execution = get_exec()
    refused = (
        # The joint plan of data-parallel ranks does not count rows.
        group.why_not(scheduler) is None,
        # A mixed row has no draft tokens.
        not scheduler.spec_algorithm.is_none(),
        # A row is computed by other kernels than a decode step: the sums would depend on what else is served.
        execution.deterministic.enable_deterministic_inference,
        execution.kernel.dsa_prefill_backend == "flashmla_sparse_q8",
        execution.features.enable_encoder_swa_bounded_replay,
        getattr(get_parallel(), "enable_megamoe_for_layernorm_sp", False),
        scheduler.device == "npu",
    )
    return not any(refused)


def _ends_early(req: Any) -> bool:
    """Return True if a request was aborted and needs nothing from its current pass."""
    plain = req.session is None and req.beam_group is None and not req.return_sampling_mask
    return plain and isinstance(req.to_finish, FINISH_ABORT)


class Colocated(Pauses):
    """Pauses of one scheduler that also decodes."""

    def retract_rest(self) -> None:
        """Retract what SGLang leaves, for example because the server pauses for new weights: queue all parked prompts
        again from their start, and drop the rows of beams from the batch that SGLang has emptied."""
        sched, chunked = self._scheduler, self._core.chunked
        sched.running_batch.beam_tail = None
        parked, chunked.parked = chunked.parked, []
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
        """Include the adapters of prompts in progress: streams can run in a pause of a prompt's next chunk."""
        return self.adapters() | {r.lora_id for r in self._builder.begun}

    # -- differences in a pause

    def _discard_if_all_aborted(self, flight: Flight) -> bool:
        """Return True if all requests were aborted, so that the pass can end. The event loop then frees its memory."""
        batch = flight.batch
        # In these cases SGLang reads more of the output than the next tokens, or keeps the KV of an aborted request. It
        # keeps that of streams, to which the pass writes for each row.
        if flight.rows or batch.return_logprob or batch.return_hidden_states:
            return False
        if not all(map(_ends_early, flight.reqs)):
            return False
        for req in flight.reqs:
            # The KV lacks some layers, so it must not become a prefix of another request.
            req.discard_output_reason = req.to_finish
        return True

    def _next(self, paused: Paused) -> Any:
        if any(f.row_ended() for f in self._core.under_way):
            # A new request would get the row and the KV memory to which the paused pass still writes.
            return None
        # Rows of the running batch can be mixed into a prefill batch.
        with self._no_results_queued():
            batch = super()._next(paused)
        return self._decode_step() if batch is None and self._core.decodes else batch

    def _launch(self, batch: Any) -> Any:
        # A verify step first advances grammars over the queued results.
        with self._no_results_queued():
            return super()._launch(batch)

    def _resumes_before_result(self) -> bool:
        return True

    def _make_poll_messages(self) -> list[Any]:
        return []

    def _poll_other_servers(self, *, due: bool) -> None:
        """Do nothing, because no request waits for another server."""

    def _follow_up(self, batch: Any) -> None:
        """Merge a prefill batch into the running batch. The event loop itself merges only the paused batch."""
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
        """Return the running batch, ready for a decode step, or None."""
        running = self._scheduler.running_batch
        running.filter_batch()
        if not streams(running) or (len(running.reqs) == 1 and not running.check_decode_mem()):
            # SGLang would abort the only stream, although the paused batch will free memory.
            return None
        with self._no_results_queued():
            batch = self._scheduler.update_running_batch(running)
        return None if batch is None or batch.is_empty() else batch

    def _no_results_queued(self) -> AbstractContextManager[None]:
        """Hide the queued results from SGLang, which would let requests end and grammars advance by them. All of these
        results have already been processed."""
        sched = self._scheduler
        return temporarily(sched, result_queue=deque()) if sched.enable_overlap else nullcontext()
