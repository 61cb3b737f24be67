"""SGLang's PrefillAdder with LAPS's rules: which requests run whole, what memory is kept, where a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from laps_core.length import SHORT
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_laps.classes import Classes


class LapsPrefillAdder(PrefillAdder):  # type: ignore[misc]
    """Builder of one batch. It reserves the KV memory that prompts in progress outside the batch still need."""

    _may_cut = True
    rem_chunk_tokens: int | None
    preempt_list: list[Any]

    def __init__(
        self,
        classes: Classes,
        note_lack: Callable[[int], None],
        *args: Any,
        reserve: int,
        limit: int | None = None,
        least: int = 0,
        unit: int = 0,
        **kwargs: Any,
    ) -> None:
        """`note_lack`: called with the KV tokens that a request needs if too few are free (0: no row is free) and the
        batch has no long request yet. `reserve`: KV tokens that prompts in progress outside the batch still need.
        `limit`: most new tokens of the prompt in progress in the batch; None = what the chunk holds. `least`: requests
        with fewer new tokens do not share a batch with larger ones. `unit`: streams can take the memory reserved for
        the prompt in progress, so its chunk is reduced to the free memory, in multiples of `unit` tokens; 0 = streams
        cannot."""
        super().__init__(*args, **kwargs)
        self._classes = classes
        self._note_lack = note_lack
        self._limit = limit
        self._least, self._unit = least, unit
        self.memory_budget.total_offset += reserve

    def add_chunked_req(self, req: Req) -> Req | None:
        """Add the prompt in progress. Return the prompt if it goes on afterwards: then no other prompt can be cut."""
        if self._limit is not None:
            self.chunked_req_limit = self._limit
        if self._unit and not self._has_memory(req):
            return req
        left: Req | None = super().add_chunked_req(req)
        if left is not None:
            self._may_cut = False
            self.memory_budget.total_offset += len(req.full_untruncated_fill_ids) - (req.extend_end or 0)
        return left

    def _has_memory(self, req: Req) -> bool:
        """Reduce the chunk to the free memory, also to that of sliding windows. Return False if no memory is free: then
        no batch is built, because streams will free memory."""
        room = int(self.cur_rem_tokens) - self.per_req_token_overhead
        if self.is_hybrid_swa and room > 0:
            room = self.memory_budget.available_chunk_tokens(room) or 0
        left_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
        limits: list[int | None] = [self.rem_chunk_tokens, self.chunked_req_limit]
        if min(left_tokens, *(n for n in limits if n is not None)) <= room:
            return True
        room = room // self._unit * self._unit
        if room > 0:
            self.chunked_req_limit = room
            return True
        req.extend_end, self.rem_chunk_tokens = req.prefix_len, 0
        return False

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> Any:
        """Add a request. Call `note_lack` if memory is too small even for the first long request beside short ones."""
        if self.can_run_list and not self._goes_with(self.can_run_list[0], req):
            return AddReqResult.OTHER
        result = super().add_one_req(req, *args, **kwargs)
        if result is AddReqResult.NO_TOKEN and self._only_short():
            # The tokens to be computed include the output of a retracted request.
            output = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
            self._note_lack(len(req.full_untruncated_fill_ids) + output + self.per_req_token_overhead)
        return result

    def _goes_with(self, first: Req, req: Req) -> bool:
        """Return True if a request can share the batch of `first`. SGLang runs a batch on embeddings if one of its
        requests is given as embeddings, and has none for the ids of others."""
        tokens = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
        as_large = (tokens < self._least) == (first.extend_len < self._least)
        return as_large and (req.input_embeds is None) == (first.input_embeds is None)

    def preempt_to_schedule(self, req: Req) -> bool:
        """With ``--enable-priority-scheduling``, make room for a request when no row is free. Return True if it can be
        added. Call `note_lack` if it cannot, even as the first long request beside short ones."""
        # A turn of a streaming session that is preempted leaves its row to the session, so that no row is free.
        turns = [r for r in self.running_batch.reqs if r.session is not None and r.session.streaming]
        self.preempt_list = [*self.preempt_list, *turns]
        found: bool = super().preempt_to_schedule(req)
        self.preempt_list = [r for r in self.preempt_list if r not in turns]
        if not found and self._only_short():
            self._note_lack(0)
        return found

    def _only_short(self) -> bool:
        """Return True if the batch has no long request yet."""
        return all(self._classes.class_of(r) == SHORT for r in self.can_run_list)

    def _select_prefill_admission(self, req: Req, **kwargs: Any) -> Any:
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        # If the request would be cut, the admission counts only the tokens before the cut.
        left_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len - kwargs["host_hit_length"]
        return admission if self._admits(req, left_tokens, admission.is_chunked) else AddReqResult.OTHER

    def add_one_req_ignore_eos(self, req: Req) -> Any:
        """Add an ``ignore_eos`` request if the prefix cache is off: SGLang skips ``_select_prefill_admission`` then."""
        left_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
        cut = self.rem_chunk_tokens is not None and left_tokens > self.rem_chunk_tokens
        return super().add_one_req_ignore_eos(req) if self._admits(req, left_tokens, cut) else AddReqResult.OTHER

    def _admits(self, req: Req, left_tokens: int, cut: bool) -> bool:
        """Return True if a request with `left_tokens` new tokens may join; `cut`: not all of them fit."""
        return not cut or (self._may_cut and (self.rem_chunk_tokens or 0) >= self._least)


class WholePrefillAdder(LapsPrefillAdder):
    """Builder of a preempting batch. It cuts no prompt, because the slot belongs to the preempted batch."""

    _may_cut = False


class ShortPrefillAdder(WholePrefillAdder):
    """Builder of a batch of short requests. A request that is no longer short waits as a long one from then on."""

    def _admits(self, req: Req, left_tokens: int, cut: bool) -> bool:
        if self._classes.outgrown(req, left_tokens):
            return False
        if cut and not self.can_run_list:
            # The request does not even fit in an empty batch (for example, a sliding window limits the chunk).
            self._classes.make_long(req, left_tokens)
        return not cut
