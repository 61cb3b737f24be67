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
"""Number of the latest tokens that determine the estimate, approximately."""
START_MESSAGE_TOKENS = 5.0
"""Tokens that a chat template adds to each message: start value, which the servers' replies correct."""
EXACT_CHARS = 16384
"""Most characters of a request that are tokenised, as other requests wait meanwhile; the rest is extrapolated."""
CALL_CHARS = 64
"""Least cost of one text in that budget (characters): many short texts take as long as one long text."""


PROMPT, CACHED = (re.compile(rb'"%b"\s*:\s*(\d{1,12})\b' % name) for name in (b"prompt_tokens", b"cached_tokens"))
"""Patterns of token counts in ``meta_info`` or ``usage`` (there, CACHED needs --enable-cache-report)."""


def reported_tokens(reply: bytes, count: re.Pattern[bytes] = PROMPT) -> int | None:
    """Return the first such count in a reply or stream, found without parsing; None without a count."""
    found = count.search(reply)
    return int(found.group(1)) if found else None


class ByteCounter:
    """Counter that estimates tokens from bytes, by a ratio learnt for chat (template included) and one for plain text.
    Media are counted separately."""

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
        """Learn from a reply that ``prompt`` has ``tokens`` tokens. The prompt has been counted before.

        Replies about ids or media are ignored, because they say nothing about bytes.
        """
        if prompt.media or prompt.unread or not prompt.measured or tokens <= 0:
            return
        chat = prompt.messages > 0
        keep = max(0.0, 1 - tokens / MEMORY_TOKENS)
        self._bytes[chat] = self._bytes[chat] * keep + prompt.measured
        self._tokens[chat] = self._tokens[chat] * keep + tokens

    def as_dict(self) -> dict[str, Any]:
        text, chat = round(self._ratio(False), 3), round(self._ratio(True), 3)
        return {"kind": "bytes", "bytes_per_token": {"text": text, "chat": chat}}


class TokenizerCounter:
    """Counter that tokenises ``exact_chars`` characters of each request and extrapolates the rest. No model is loaded.

    Raises ConfigError if ``path`` holds no tokenizer or the ``tokenizers`` package is missing.
    """

    def __init__(self, path: str, exact_chars: int = EXACT_CHARS) -> None:
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
        self._exact_chars = exact_chars
        self._message_tokens = START_MESSAGE_TOKENS

    def count(self, prompt: Prompt) -> int:
        """Return the tokens of texts and ids, and the tokens that the chat template adds.

        ``exact_chars`` limits the time for which a request blocks the event loop.
        """
        budget, seen, tokens = self._exact_chars, 0, 0
        for text in prompt.texts:
            if budget <= 0:
                break
            head = text[:budget]
            budget -= max(len(head), CALL_CHARS)
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
            # The text has a lone surrogate. The servers replace it, too.
            return len(self._tokenizer.encode(text.encode("utf-8", "replace").decode()).ids)

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """Correct the tokens per message that the chat template adds; the rest is exact already."""
        if not prompt.messages or prompt.media or prompt.unread or prompt.measured is None:
            return
        seen = (tokens - prompt.measured) / prompt.messages
        self._message_tokens += 0.1 * (min(max(seen, 0.0), 64.0) - self._message_tokens)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "tokenizer", "path": self._path, "tokens_per_message": round(self._message_tokens, 2)}


TokenCounter = ByteCounter | TokenizerCounter
