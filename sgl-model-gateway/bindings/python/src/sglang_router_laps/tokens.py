"""How many tokens a prompt has: counted with a tokenizer, or estimated from bytes and corrected by the replies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from sglang_laps.policy.config import ConfigError

from .prompt import Prompt

START_BYTES_PER_TOKEN = 4.0
MOST_BYTES_PER_TOKEN = 16.0
MEMORY_TOKENS = 100_000.0
"""About how many tokens back the estimate remembers."""
START_MESSAGE_TOKENS = 5.0
"""What a chat template adds to each message until replies say otherwise (tokens)."""

_REPORTED = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')


class TokenCounter(Protocol):
    """Counts the tokens of a prompt and learns from what replies report."""

    def count(self, prompt: Prompt) -> int:
        """Tokens of all texts, ids and message overheads; media apart."""

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """A reply said that ``prompt`` has ``tokens`` tokens."""

    def as_dict(self) -> dict[str, Any]:
        """What it is and what it has learnt, JSON-ready."""


def reported_tokens(reply: bytes) -> int | None:
    """``prompt_tokens`` of a reply or of a stream's first event, found without parsing it all."""
    found = _REPORTED.search(reply)
    return int(found.group(1)) if found else None


def utf8_len(text: str) -> int:
    """Bytes of ``text`` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class ByteCounter:
    """An online estimate: one ratio for chat (template included), one for plain text."""

    def __init__(self) -> None:
        self._bytes = {False: START_BYTES_PER_TOKEN, True: START_BYTES_PER_TOKEN}
        self._tokens = {False: 1.0, True: 1.0}

    def _ratio(self, chat: bool) -> float:
        return min(max(self._bytes[chat] / self._tokens[chat], 1.0), MOST_BYTES_PER_TOKEN)

    def count(self, prompt: Prompt) -> int:
        """An estimate; ids are exact."""
        exact = sum(map(len, prompt.ids))
        if not prompt.texts:
            return exact
        return exact + round(sum(map(utf8_len, prompt.texts)) / self._ratio(prompt.messages > 0))

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """Shift the ratio of this kind of prompt; replies about ids or media teach nothing of bytes."""
        if prompt.ids or prompt.media or not prompt.texts or tokens <= 0:
            return
        chat = prompt.messages > 0
        keep = max(0.0, 1 - tokens / MEMORY_TOKENS)
        self._bytes[chat] = self._bytes[chat] * keep + sum(map(utf8_len, prompt.texts))
        self._tokens[chat] = self._tokens[chat] * keep + tokens

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        text, chat = round(self._ratio(False), 3), round(self._ratio(True), 3)
        return {"kind": "bytes", "bytes_per_token": {"text": text, "chat": chat}}


class TokenizerCounter:
    """Exact counts up to ``exact_bytes`` of each text, its own ratio beyond. No model is loaded.

    Raises ConfigError when ``path`` holds no tokenizer or the ``tokenizers`` package is missing.
    """

    def __init__(self, path: str, exact_bytes: int) -> None:
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
        """Tokens of the texts as the tokenizer cuts them, and what the chat template has been adding."""
        return self._plain(prompt) + round(prompt.messages * self._message_tokens)

    def _plain(self, prompt: Prompt) -> int:
        return sum(map(len, prompt.ids)) + sum(map(self._one, prompt.texts))

    def _one(self, text: str) -> int:
        if len(text) <= self._exact_bytes:
            return len(self._tokenizer.encode(text).ids)
        head = text[: self._exact_bytes]
        return round(len(self._tokenizer.encode(head).ids) * len(text) / len(head))

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """Correct what the chat template adds; the rest is exact already."""
        if not prompt.messages or prompt.media or sum(map(len, prompt.texts)) > self._exact_bytes:
            return
        seen = (tokens - self._plain(prompt)) / prompt.messages
        self._message_tokens += 0.1 * (min(max(seen, 0.0), 64.0) - self._message_tokens)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"kind": "tokenizer", "path": self._path, "tokens_per_message": round(self._message_tokens, 2)}


def make_counter(path: str | None, exact_bytes: int) -> TokenCounter:
    """The exact counter when a tokenizer is given, else the estimate. Raises ConfigError."""
    return TokenizerCounter(path, exact_bytes) if path else ByteCounter()
