"""Penalties of streams: each output token counts once, whatever ran between two decode steps.

SGLang counts the last token that was processed. In its overlap loop that is the one before the last, as long as decode
steps follow each other; each other batch between two of them has a token counted twice, or left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

COUNT = "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"


def count(original: Callable[..., Any], batch: Any) -> Any:
    """Around SGLang's method: count the token by its place."""
    if not getattr(batch.model_config, "laps_colocated", False) or batch.seq_lens_cpu is None:
        return original(batch)
    # With the overlap loop's lag, so that each request has the answer that it has alone.
    lag = 1 if batch.enable_overlap else 0
    places = [n - lag for n in batch.seq_lens_cpu.tolist()]
    tokens = [_token(req, at) for req, at in zip(batch.reqs, places, strict=True)]
    counted = torch.tensor(tokens, dtype=torch.int64).to(batch.device, non_blocking=True)
    return batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(counted)


def _token(req: Any, place: int) -> int:
    prompt = len(req.origin_input_ids)
    return int(req.origin_input_ids[place] if place < prompt else req.output_ids[place - prompt])
