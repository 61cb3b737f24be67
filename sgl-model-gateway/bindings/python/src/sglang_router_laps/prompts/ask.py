"""What a request asks to be prefilled, as far as its routing needs it: numbers and hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .prefixes import Fingerprint, PrefixIndex, fingerprint
from .reading import Prompt
from .tokens import START_BYTES_PER_TOKEN, TokenCounter

MEDIA_TOKENS = 512
"""What one image, video or audio part counts. Models and resolutions differ widely: with one, a request is long."""
PROMPTS_MAX = 64
"""Of a batch, so many prompts are looked up in the prefix indexes: they stand for the rest."""


@dataclass(slots=True)
class Ask:
    """The prompts of one request."""

    tokens: int
    """Of texts and ids."""
    prompts: Sequence[Fingerprint] = ()
    media: int = 0
    """Such parts whose place in the prompt is not known: no server is taken to hold them."""

    @property
    def total(self) -> int:
        """Tokens of all of it."""
        return self.tokens + (self.media + sum(len(p.media) for p in self.prompts)) * MEDIA_TOKENS

    def new(self, index: PrefixIndex) -> int:
        """Tokens expected to be computed where ``index`` tells what is held (>= 1)."""
        share, media = 0.0, self.media
        for p in self.prompts:
            depth = index.depth(p)
            share += depth * p.covered
            media += sum(block >= depth for block in p.media)
        if share:
            # Of a batch the share is the mean over its prompts: an estimate that needs no lengths.
            share /= len(self.prompts)
        return max(1, round(self.tokens * (1 - share)) + media * MEDIA_TOKENS)


NOTHING = Ask(0)
"""What a request asks whose prompt is not known yet, or of no more use."""


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
