"""Prompts that SGLang must not be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from laps_core.refusals import MEDIA, ONE_SAMPLE, several_samples

VALIDATE = "managers.tokenizer_manager.TokenizerManager._validate_one_request"
"""Every request passes it once its prompt is token ids, those of a batch one by one."""


def validate(original: Callable[..., Any], manager: Any, obj: Any, input_ids: Sequence[int] | None) -> Any:
    """Around ``_validate_one_request``: no tokens, or several samples, are a bad request. ValueError, answered 400.

    SGLang refuses an empty list of ids. An empty text it runs, as a batch of no tokens, which ends the server.
    """
    if input_ids is not None and len(input_ids) == 0 and not any(getattr(obj, name, None) for name in MEDIA):
        raise ValueError("the prompt is empty: it has no tokens")
    if several_samples(getattr(obj, "sampling_params", None)):
        raise ValueError(ONE_SAMPLE)
    return original(manager, obj, input_ids)
