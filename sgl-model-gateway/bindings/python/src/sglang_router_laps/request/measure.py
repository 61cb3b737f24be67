"""From a prompt to what its routing needs: numbers and hashes."""

from __future__ import annotations

from ..pools.ask import Ask
from ..servers.prefixes import fingerprint
from .prompt import Prompt
from .tokens import START_BYTES_PER_TOKEN, TokenCounter

PROMPTS_MAX = 64
"""Of a batch, so many prompts are looked up in the prefix indexes: they stand for the rest."""


def measure(prompt: Prompt, counter: TokenCounter, size: int) -> Ask:
    """Measure ``prompt``, of a request body of ``size`` bytes.

    What could not be read may be as long as the body allows.
    """
    tokens = counter.count(prompt)
    if prompt.unread:
        tokens = max(tokens, round(size / START_BYTES_PER_TOKEN))
    prints = [fingerprint(t.encode("utf-8", "surrogatepass"), prompt.media_at) for t in prompt.texts[:PROMPTS_MAX]]
    prints += [fingerprint(i) for i in prompt.ids[: PROMPTS_MAX - len(prints)]]
    return Ask(tokens, prints, prompt.media - sum(len(p.media) for p in prints))
