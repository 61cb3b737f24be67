"""What a request asks to be prefilled, as far as its routing needs it: numbers and hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..servers.prefixes import Fingerprint, PrefixIndex

MEDIA_TOKENS = 512
"""What one image, video or audio part counts. Models and resolutions differ widely: with one, a request is long."""


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
