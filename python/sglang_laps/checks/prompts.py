"""Requests that must not reach SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from laps_core.refusals import ONE_SAMPLE, several_samples

from sglang_laps import deadlines, seams
from sglang_laps.checks import control, fatal
from sglang_laps.support import resolved

VALIDATE = "managers.tokenizer_manager.TokenizerManager._validate_one_request"
"""Method that checks every request once its prompt is token ids; requests of a batch are checked one by one."""


def hook() -> None:
    """Have this process check each request before it goes to a scheduler. Further calls have no effect."""
    if seams.hooked(VALIDATE):
        return
    seams.hook(fatal.SAMPLING, deadlines.verify, "BEFORE")
    seams.hook(fatal.SAMPLING, fatal.verify, "BEFORE")
    seams.hook(VALIDATE, validate, "AROUND")
    seams.hook(fatal.SAMPLES, fatal.require_few_samples, "AFTER")
    for method in fatal.RECORDS:
        seams.hook(method, fatal.require_recorder, "BEFORE")
    control.hook_manager()


def validate(original: Callable[..., Any], manager: Any, obj: Any, input_ids: Sequence[int] | None) -> Any:
    """Wrap ``_validate_one_request``: raise ValueError (answered 400) for no tokens, for values that would end the
    scheduler (``fatal``), or, with disaggregation, for several samples: they would share one bootstrap room.

    SGLang refuses an empty list of ids. But SGLang runs an empty text as a batch without tokens, which ends the server.
    """
    if input_ids is not None and len(input_ids) == 0 and not fatal.has_media(obj, manager.model_config):
        session = getattr(obj, "session_params", None)
        # The history of a session can be the whole prompt; the scheduler refuses a session without one.
        if not (isinstance(session, dict) and session.get("id") is not None):
            raise ValueError("the prompt is empty: it has no tokens")
    if manager.disaggregation_mode.value != "null":
        fatal.require_room(obj)
        if several_samples(getattr(obj, "sampling_params", None)):
            raise ValueError(ONE_SAMPLE)
    else:
        fatal.require_rollback(obj, manager.server_args)
    fatal.require_known_labels(obj, manager.server_args.tokenizer_metrics_allowed_custom_labels)
    if manager.server_args.enable_custom_logit_processor:
        fatal.require_processor(obj)
    fatal.require_harmless(obj, manager.model_config)
    result = original(manager, obj, input_ids)
    if getattr(obj, "token_indices_to_pool", None) is not None:
        # SGLang may have truncated the ids.
        fatal.require_positions(obj, input_ids, resolved(manager.server_args))
    return result
