"""Penalties of streams: each output token counts once, even if other batches run between two decode steps.

SGLang counts the token that was processed last. In the overlap loop this is the last token but one, as long as decode
steps follow each other directly. If another batch runs between two steps, SGLang counts a token twice, or not at all.
For a retracted stream, SGLang starts the count again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

COUNT = "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"


def count(original: Callable[..., Any], batch: Any) -> Any:
    """Wrap SGLang's method: count the token of each request by its position."""
    if not getattr(batch.model_config, "laps_colocated", False) or batch.seq_lens_cpu is None:
        return original(batch)
    # After the requests come further rows of beams, which have no penalties.
    ends = batch.seq_lens_cpu[: len(batch.reqs)].tolist()
    tokens = [_token(req, n - _behind(batch, req)) for req, n in zip(batch.reqs, ends, strict=True)]
    counted = torch.tensor(tokens, dtype=torch.int64).to(batch.device, non_blocking=True)
    return batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(counted)


def recount(batch: Any) -> None:
    """Count the output tokens that retracted requests of this prefill batch already had, as if they had gone on."""
    penalizers = batch.sampling_info.penalizer_orchestrator
    if not penalizers.is_required:
        return
    prefilled = len(batch.reqs) - len(batch.decoding_reqs or ())
    for row, req in enumerate(batch.reqs[:prefilled]):
        first = len(req.origin_input_ids) - _lag(batch)
        tokens = [_token(req, first + i) for i in range(len(req.output_ids))]
        counted = torch.tensor(tokens, dtype=torch.int64).to(batch.device)
        for one in penalizers.penalizers.values() if tokens else ():
            alone = _row(one, row)
            for token in torch.split(counted, 1):
                alone.cumulate_output_tokens(token)


def _lag(batch: Any) -> int:
    """Return the tokens by which counting lags: as in the overlap loop, so that each request gets the answer that the
    request gets when it runs alone."""
    return 1 if batch.enable_overlap else 0


def _behind(batch: Any, req: Any) -> int:
    """Return the tokens by which counting lags the known length, which with drafts is itself known one step later."""
    drafts = not batch.spec_algorithm.is_none() and req.decode_batch_idx > 0
    return 0 if drafts else _lag(batch)


def _token(req: Any, place: int) -> int:
    prompt = len(req.origin_input_ids)
    return int(req.origin_input_ids[place] if place < prompt else req.output_ids[place - prompt])


def _row(penalizer: Any, row: int) -> Any:
    """Return a penalizer for this row alone, which shares the counts of the row: both change in place."""
    alone = copy.copy(penalizer)
    for name, value in vars(penalizer).items():
        if isinstance(value, torch.Tensor):
            setattr(alone, name, value[row : row + 1])
    return alone
