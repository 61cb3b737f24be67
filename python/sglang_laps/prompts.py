"""Prompts that SGLang must not be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
"""Every request passes it once its prompt is token ids, those of a batch one by one."""
_MEDIA = ("input_embeds", "image_data", "video_data", "audio_data")


def validate(original: Callable[..., Any], manager: Any, obj: Any, input_ids: Sequence[int] | None) -> Any:
    """Around ``_validate_one_request``: a prompt of no tokens is a bad request. Raises ValueError, answered 400.

    SGLang refuses an empty list of ids. An empty text it runs, as a batch of no tokens, which ends the server.
    """
    if input_ids is not None and len(input_ids) == 0 and not any(getattr(obj, name, None) for name in _MEDIA):
        raise ValueError("the prompt is empty: it has no tokens")
    return original(manager, obj, input_ids)
