"""Requests that no prefill server can serve. The router refuses them, and so does a server without a router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEDIA = ("input_embeds", "image_data", "video_data", "audio_data")
"""Fields of a request that are prefilled together with its text, or in its place: the text can then be empty."""
OVERRIDES = "positional_embed_overrides"
"""Field that only Python callers can fill; text in it ends every server that gets it."""
NO_OVERRIDES = f"{OVERRIDES}: not over HTTP"
ONE_SAMPLE = "n: only one sample per prompt is served here; send the request once for each sample"


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
