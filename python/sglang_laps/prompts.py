"""Prompts that SGLang must not be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
"""Every request passes it once its prompt is token ids, those of a batch one by one."""
_MEDIA = ("input_embeds", "image_data", "video_data", "audio_data")


def validate(original: Callable[..., Any], manager: Any, obj: Any, input_ids: Sequence[int] | None) -> Any:
    """Around ``_validate_one_request``: no tokens, or several samples, are a bad request. ValueError, answered 400.

    SGLang refuses an empty list of ids. An empty text it runs, as a batch of no tokens, which ends the server. All
    samples of one prompt it sends through one room, where the decode server makes a room for each: none is ever
    answered, and one that comes while the room still says that a transfer is done ends the server.
    """
    if input_ids is not None and len(input_ids) == 0 and not any(getattr(obj, name, None) for name in _MEDIA):
        raise ValueError("the prompt is empty: it has no tokens")
    if _samples(getattr(obj, "sampling_params", None)) > 1:
        raise ValueError("n: a prefill server serves one sample per prompt; send the request once for each sample")
    return original(manager, obj, input_ids)


def _samples(params: Any) -> int:
    if not isinstance(params, dict) or (params.get("beam_width") or 1) > 1:
        return 1  # the beams of a search are no samples
    return params.get("n") or 1
