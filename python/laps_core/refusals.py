"""Requests that no prefill server may be given: the router refuses them, and the server what came past no router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEDIA = ("input_embeds", "image_data", "video_data", "audio_data")
"""Members of a request that are prefilled beside its text or in its place: with one, the text may be empty."""
ONE_SAMPLE = "n: only one sample per prompt is served here; send the request once for each sample"


def several_samples(params: Any) -> bool:
    """Return True if sampling parameters, whatever they are, ask for more than one sample of a prompt.

    A prefill and a decode server meet in one room per prompt. Of several samples each side makes rooms of its own: they
    never meet, the client waits until it gives up, and one that comes while the room still says that a transfer is done
    ends the server. A beam search returns n of its beams, without another request.
    """
    if not isinstance(params, Mapping) or _above_one(params.get("beam_width")):
        return False
    return _above_one(params.get("n"))


def _above_one(n: Any) -> bool:
    try:
        # The servers read numbers in strings as numbers.
        n = float(n) if isinstance(n, str) else n
    except ValueError:
        return False
    return isinstance(n, (int, float)) and n > 1
