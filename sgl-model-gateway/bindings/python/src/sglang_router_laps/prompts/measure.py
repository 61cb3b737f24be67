"""Measurement of prompts for the choice of a server: token counts and fingerprints."""

from __future__ import annotations

from laps_core.pools.prefixes import PROMPTS_MAX, Ask, fingerprint

from .reading import Prompt
from .tokens import START_BYTES_PER_TOKEN, TokenCounter


def measure(prompt: Prompt, counter: TokenCounter, size: int) -> Ask:
    """Return the token counts and fingerprints of ``prompt``, from a request body of ``size`` bytes.

    A prompt that could not be read counts with at least the tokens that a text of ``size`` bytes would have.
    """
    tokens = counter.count(prompt)
    if prompt.unread:
        tokens = max(tokens, round(size / START_BYTES_PER_TOKEN))
    texts, seed = (t.encode("utf-8", "surrogatepass") for t in prompt.texts[:PROMPTS_MAX]), prompt.seed
    prints = [fingerprint(t, prompt.media_at, seed) for t in texts]
    prints += [fingerprint(i, seed=seed) for i in prompt.ids[: PROMPTS_MAX - len(prints)]]
    return Ask(tokens, prints, prompt.media - sum(len(p.media) for p in prints))
