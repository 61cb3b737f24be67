"""SGLang's batch builder, taught what stays whole, what memory is kept, and where a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from laps_core.length import SHORT
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_laps.classes import Classes


class LapsPrefillAdder(PrefillAdder):  # type: ignore[misc]
    """Builds a batch beside prompts in progress that are not in it, and keeps the memory that they still need."""

    _may_cut = True
    rem_chunk_tokens: int | None

    def __init__(
        self,
        classes: Classes,
        lacks: Callable[[int], None],
        *args: Any,
        reserve: int,
        limit: int | None = None,
        least: int = 0,
        unit: int = 0,
        **kwargs: Any,
    ) -> None:
        """`lacks`: told how many tokens of memory a request needs that finds too little, while no long one is in the
        batch. `reserve`: KV tokens those prompts still need. `limit`: most new tokens of the prompt in progress that is
        in the batch; None = what the chunk holds. `least`: requests with fewer new tokens have batches of their own.
        `unit`: where streams may have taken what was kept for the prompt in progress, its chunk is cut down to what is
        free, in multiples of this; 0 = they cannot."""
        super().__init__(*args, **kwargs)
        self._classes = classes
        self._lacks = lacks
        self._limit = limit
        self._least, self._unit = least, unit
        self.memory_budget.total_offset += reserve

    def add_chunked_req(self, req: Req) -> Req | None:
        """The prompt in progress. One that goes on after this batch holds the one slot for cut prompts."""
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
        """Cut the chunk down to the memory that is free, of windows, too; False, and no batch, where there is none:
        streams will give theirs back."""
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
        """Says when memory keeps even the first long request out; short ones may have joined before it."""
        tokens = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
        if self.can_run_list and (tokens < self._least) != (self.can_run_list[0].extend_len < self._least):
            return AddReqResult.OTHER
        result = super().add_one_req(req, *args, **kwargs)
        if result is AddReqResult.NO_TOKEN and all(self._classes.of(r) == SHORT for r in self.can_run_list):
            needed = len(req.full_untruncated_fill_ids) + req.sampling_params.max_new_tokens
            self._lacks(needed + self.per_req_token_overhead)
        return result

    def _select_prefill_admission(self, req: Req, **kwargs: Any) -> Any:
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        # Of one that is to be cut, the admission holds no more than the cut.
        left_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len - kwargs["host_hit_length"]
        return admission if self._admits(req, left_tokens, admission.is_chunked) else AddReqResult.OTHER

    def add_one_req_ignore_eos(self, req: Req) -> Any:
        """SGLang's way past ``_select_prefill_admission``, for ``ignore_eos`` where the prefix cache is off."""
        left_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
        cut = self.rem_chunk_tokens is not None and left_tokens > self.rem_chunk_tokens
        return super().add_one_req_ignore_eos(req) if self._admits(req, left_tokens, cut) else AddReqResult.OTHER

    def _admits(self, req: Req, left_tokens: int, cut: bool) -> bool:
        """Return True if the request may join: it has this many new tokens, and runs whole or is `cut`."""
        return not cut or (self._may_cut and (self.rem_chunk_tokens or 0) >= self._least)


class WholePrefillAdder(LapsPrefillAdder):
    """Builds a batch that preempts: nothing in it is cut, for the slot belongs to the batch that is preempted."""

    _may_cut = False


class ShortPrefillAdder(WholePrefillAdder):
    """Builds a batch of short requests. One that is short no more waits as long."""

    def _admits(self, req: Req, left_tokens: int, cut: bool) -> bool:
        if self._classes.outgrown(req, left_tokens):
            return False
        if cut and not self.can_run_list:
            # Not even an empty batch holds it (a sliding window's cap on chunks, say).
            self._classes.make_long(req, left_tokens)
        return not cut
