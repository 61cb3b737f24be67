"""Penalties of streams: each output token counts once, whatever ran between two decode steps.

SGLang counts the last token that was processed. In its overlap loop that is the one before the last, as long as decode
steps follow each other; each other batch between two of them has a token counted twice, or left out. And a stream that
was retracted begins to count anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

COUNT = "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"


def count(original: Callable[..., Any], batch: Any) -> Any:
    """Around SGLang's method: count the token by its place."""
    if not getattr(batch.model_config, "laps_colocated", False) or batch.seq_lens_cpu is None:
        return original(batch)
    ends = batch.seq_lens_cpu.tolist()
    tokens = [_token(req, n - _behind(batch, req)) for req, n in zip(batch.reqs, ends, strict=True)]
    counted = torch.tensor(tokens, dtype=torch.int64).to(batch.device, non_blocking=True)
    return batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(counted)


def recount(batch: Any) -> None:
    """Count what requests of this prefill batch have answered before they were retracted, as if they had gone on."""
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
    """Tokens by which counting is behind: that of the overlap loop, so that each request has the answer that it has
    alone."""
    return 1 if batch.enable_overlap else 0


def _behind(batch: Any, req: Any) -> int:
    """Tokens by which counting is behind the length that is known: that of drafts is known one step later."""
    drafts = not batch.spec_algorithm.is_none() and req.decode_batch_idx > 0
    return 0 if drafts else _lag(batch)


def _token(req: Any, place: int) -> int:
    prompt = len(req.origin_input_ids)
    return int(req.origin_input_ids[place] if place < prompt else req.output_ids[place - prompt])


def _row(penalizer: Any, row: int) -> Any:
    """A penalizer of this request alone, which shares its counts: they are changed in place."""
    alone = copy.copy(penalizer)
    for name, value in vars(penalizer).items():
        if isinstance(value, torch.Tensor):
            setattr(alone, name, value[row : row + 1])
    return alone
