"""Requests that no prefill server can serve. The router refuses them, and so does a server without a router."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MEDIA = ("input_embeds", "image_data", "video_data", "audio_data")
"""Fields of a request that are prefilled together with its text, or in its place: the text can then be empty."""
OVERRIDES = "positional_embed_overrides"
"""Field that only Python callers can fill; text in it ends every server that gets it."""
NO_OVERRIDES = f"{OVERRIDES}: not over HTTP"
LABELS = "custom_labels"
"""Field with labels of metrics. One that a server does not know ends the server."""
PER_PROMPT = (
    *("return_hidden_states", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask"),
    *("lora_path", "lora_id", "custom_logit_processor", "bootstrap_pair_key", "decode_tp_size"),
)
"""Fields that can be lists, with a value for each prompt of a batch. A list for a single prompt ends every server that
gets it."""
SESSION = {"id": str, "rid": str, "offset": int}
"""Types of the names and positions in ``session_params``. A value of another type ends every server that gets it,
because it looks up and slices by whatever comes."""
ONE_SAMPLE = "n: only one sample per prompt is served here; send the request once for each sample"


def misplaced(value: Callable[[str], Any], *, batch: bool) -> str | None:
    """Return what is wrong with a request that has these values of fields (None: not given), or None. `batch`: the
    request has a list of prompts."""
    found = None if batch else next((name for name in PER_PROMPT if isinstance(value(name), list)), None)
    if found:
        return f"{found}: a list, but there is one prompt"
    if value("lora_id") is not None and not value("lora_path"):
        return "lora_id: the servers give it to the adapter that lora_path names"
    session = value("session_params")
    for name, kind in SESSION.items() if isinstance(session, Mapping) else ():
        if not isinstance(session.get(name), kind | None):
            return f"session_params: {name} is not of type {kind.__name__}"
    return None


def several_samples(params: Any) -> bool:
    """Return True if sampling parameters (of any type) ask for more than one sample of a prompt.

    A prefill and a decode server meet in one bootstrap room per prompt. For several samples each server makes its own
    bootstrap rooms, so they never meet, and the client waits until it gives up. A sample that comes while the room
    still says that a transfer is done ends the server. A beam search returns n of its beams, with one request.
    """
    if not isinstance(params, Mapping) or _above_one(params.get("beam_width")):
        return False
    return _above_one(params.get("n"))


def _above_one(n: Any) -> bool:
    try:
        # The servers accept numbers in strings.
        n = float(n) if isinstance(n, str) else n
    except ValueError:
        return False
    return isinstance(n, (int, float)) and n > 1
