"""Token counts of prompts: by a tokenizer, or estimated from bytes and corrected by the servers' replies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from laps_core.config import ConfigError

from .reading import Prompt, utf8_len

START_BYTES_PER_TOKEN = 4.0
MOST_BYTES_PER_TOKEN = 16.0
MEMORY_TOKENS = 100_000.0
"""Memory of the estimate, about (tokens)."""
START_MESSAGE_TOKENS = 5.0
"""Tokens that a chat template adds to each message, until replies say otherwise."""
EXACT_BYTES = 16384
"""Bytes of a request that are tokenised; the rest is extrapolated, as all other requests wait meanwhile."""
CALL_BYTES = 64
"""Least cost of one text in that budget (bytes): many short texts take as long as one long text."""


PROMPT, CACHED = (re.compile(rb'"%b"\s*:\s*(\d{1,12})\b' % name) for name in (b"prompt_tokens", b"cached_tokens"))
"""Counts in ``meta_info``, or in ``usage`` (cached tokens with --enable-cache-report)."""


def reported_tokens(reply: bytes, count: re.Pattern[bytes] = PROMPT) -> int | None:
    """Return a count of a reply or of a stream's first event, found without parsing."""
    found = count.search(reply)
    return int(found.group(1)) if found else None


class ByteCounter:
    """Estimates tokens of texts and messages online: one ratio for chat (template included), one for plain text. Media
    are counted apart."""

    def __init__(self) -> None:
        self._bytes = {False: START_BYTES_PER_TOKEN, True: START_BYTES_PER_TOKEN}
        self._tokens = {False: 1.0, True: 1.0}

    def _ratio(self, chat: bool) -> float:
        return min(max(self._bytes[chat] / self._tokens[chat], 1.0), MOST_BYTES_PER_TOKEN)

    def count(self, prompt: Prompt) -> int:
        """Return the estimated tokens of ``prompt``; ids are exact."""
        exact = sum(map(len, prompt.ids))
        if not prompt.texts:
            return exact
        size = sum(map(utf8_len, prompt.texts))
        if not exact:
            prompt.measured = size
        return exact + round(size / self._ratio(prompt.messages > 0))

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """Learn from a reply that ``prompt``, counted before, has ``tokens`` tokens.

        Replies about ids or media teach nothing about bytes.
        """
        if prompt.media or prompt.unread or not prompt.measured or tokens <= 0:
            return
        chat = prompt.messages > 0
        keep = max(0.0, 1 - tokens / MEMORY_TOKENS)
        self._bytes[chat] = self._bytes[chat] * keep + prompt.measured
        self._tokens[chat] = self._tokens[chat] * keep + tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the kind of counter and its estimates, JSON-ready."""
        text, chat = round(self._ratio(False), 3), round(self._ratio(True), 3)
        return {"kind": "bytes", "bytes_per_token": {"text": text, "chat": chat}}


class TokenizerCounter:
    """Counts the first ``exact_bytes`` of each request exactly, and extrapolates the rest. No model is loaded.

    Raises ConfigError when ``path`` holds no tokenizer or the ``tokenizers`` package is missing.
    """

    def __init__(self, path: str, exact_bytes: int = EXACT_BYTES) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError("--laps-tokenizer: the package tokenizers is not installed") from None
        file = Path(path)
        if file.is_dir():
            file /= "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as e:
            why = " ".join(str(e).split())
            raise ConfigError(f"--laps-tokenizer: {path}: no tokenizer could be read: {why}") from None
        self._path = path
        self._exact_bytes = exact_bytes
        self._message_tokens = START_MESSAGE_TOKENS

    def count(self, prompt: Prompt) -> int:
        """Return the tokens of the texts, and those that the chat template adds.

        The time that the event loop waits for this is bounded per request.
        """
        budget, seen, tokens = self._exact_bytes, 0, 0
        for text in prompt.texts:
            if budget <= 0:
                break
            head = text[:budget]
            budget -= max(len(head), CALL_BYTES)
            seen += len(head)
            tokens += self._encode(head)
        ids, size = sum(map(len, prompt.ids)), sum(map(len, prompt.texts))
        if seen == size:
            prompt.measured = ids + tokens
        else:
            tokens = round(tokens * size / max(1, seen))
        return ids + tokens + round(prompt.messages * self._message_tokens)

    def _encode(self, text: str) -> int:
        try:
            return len(self._tokenizer.encode(text).ids)
        except (TypeError, UnicodeError):
            # A lone surrogate; the servers replace it, too.
            return len(self._tokenizer.encode(text.encode("utf-8", "replace").decode()).ids)

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """Correct the tokens that the chat template adds; the rest is exact already."""
        if not prompt.messages or prompt.media or prompt.unread or prompt.measured is None:
            return
        seen = (tokens - prompt.measured) / prompt.messages
        self._message_tokens += 0.1 * (min(max(seen, 0.0), 64.0) - self._message_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the kind of counter and its estimates, JSON-ready."""
        return {"kind": "tokenizer", "path": self._path, "tokens_per_message": round(self._message_tokens, 2)}


TokenCounter = ByteCounter | TokenizerCounter
