"""What of a request body will be prefilled, for each route MiniLB serves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

GENERATE = "generate"
COMPLETIONS = "v1/completions"
CHAT = "v1/chat/completions"


@dataclass(slots=True)
class Prompt:
    """The prompts of one request. A batch has several."""

    texts: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    messages: int = 0
    """Chat messages, each of which the template adds a few tokens to."""
    media: int = 0
    """Image, video and audio parts."""
    media_at: list[int] = field(default_factory=list)
    """Where in the one text each of them ends (bytes of UTF-8); none where that is not known."""
    unread: bool = False
    """Not all of it could be read: its length is unknown."""
    plain: int | None = None
    """Tokens of texts and ids, once they have been counted and not estimated."""
    text_bytes: int = 0
    """Of the texts, once they have been counted and there is nothing else."""


def read_prompt(endpoint: str, body: Mapping[str, Any]) -> Prompt:
    """Read what counts. What cannot be read is marked as such: whether it is an error the server will say."""
    return READERS[endpoint](body)


def batch_size(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """Prompts of a /generate batch; None for a single prompt or another route."""
    if endpoint != GENERATE:
        return None
    text = body.get("text")
    if text is not None:
        return len(text) if isinstance(text, list) else None
    ids = body.get("input_ids")
    return len(ids) if isinstance(ids, list) and ids and isinstance(ids[0], list) else None


def _take(prompt: Prompt, value: Any) -> None:
    """One prompt, or a list of prompts."""
    if not isinstance(value, list):
        _take_one(prompt, value)
    elif not _take_ids(prompt, value):
        for one in value:
            _take_one(prompt, one)


def _take_one(prompt: Prompt, value: Any) -> None:
    if isinstance(value, str):
        prompt.texts.append(value)
    elif not (isinstance(value, list) and _take_ids(prompt, value)):
        prompt.unread = True


def _take_ids(prompt: Prompt, value: list[Any]) -> bool:
    ok = set(map(type, value)) == {int}
    if ok:
        prompt.ids.append(value)
    return ok


def _generate(body: Mapping[str, Any]) -> Prompt:
    prompt = Prompt()
    text = body.get("text")
    _take(prompt, body.get("input_ids") if text is None else text)
    for name in ("image_data", "video_data", "audio_data"):
        media = body.get(name)
        if isinstance(media, list):
            # Of a batch each prompt has a list of its own.
            prompt.media += sum(len(one) if isinstance(one, list) else 1 for one in media)
        elif media:
            prompt.media += 1
    return prompt


def _completions(body: Mapping[str, Any]) -> Prompt:
    prompt = Prompt()
    _take(prompt, body.get("prompt"))
    return prompt


class _Pieces:
    """The text of a conversation as it grows, with the places of what is no text."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._pieces: list[str] = []
        self._measured = (0, 0)

    def add(self, text: str) -> None:
        self._pieces.append(text)

    def add_json(self, value: Any) -> None:
        self._pieces.append(self._dump(value))

    def add_media(self, part: dict[str, Any]) -> None:
        """A marker keeps prompts with different images apart: the text before them may be the same."""
        self._pieces.append(f"\n<media {hash(self._dump(part)):x}>")
        done, at = self._measured
        at += sum(map(utf8_len, self._pieces[done:]))
        self._measured = (len(self._pieces), at)
        self._prompt.media += 1
        self._prompt.media_at.append(at)

    def text(self) -> str:
        return "".join(self._pieces)

    def _dump(self, value: Any) -> str:
        try:
            return orjson.dumps(value).decode()
        except TypeError:
            pass
        try:
            return json.dumps(value, ensure_ascii=False)
        except RecursionError:
            self._prompt.unread = True
            return ""


def _chat(body: Mapping[str, Any]) -> Prompt:
    prompt = Prompt()
    pieces = _Pieces(prompt)
    tools = body.get("tools")
    if tools:
        pieces.add_json(tools)
    messages = body.get("messages")
    if not isinstance(messages, list):
        prompt.unread = True
        return prompt
    for message in messages:
        if not isinstance(message, dict):
            prompt.unread = True
            continue
        prompt.messages += 1
        role = message.get("role")
        # The marker keeps the prefix of a conversation a prefix of its next turn, and roles apart.
        pieces.add(f"\n<{role if isinstance(role, str) else None}>")
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            if isinstance(part, str):
                pieces.add(part)
            elif isinstance(part, dict):
                text = part.get("text")
                if isinstance(text, str):
                    pieces.add(text)
                elif part.get("type") != "text":
                    pieces.add_media(part)
            elif part is not None:
                prompt.unread = True
        calls = message.get("tool_calls")
        if calls:
            pieces.add_json(calls)
    prompt.texts.append(pieces.text())
    return prompt


def utf8_len(text: str) -> int:
    """Bytes of ``text`` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


READERS: dict[str, Callable[[Mapping[str, Any]], Prompt]] = {
    GENERATE: _generate,
    COMPLETIONS: _completions,
    CHAT: _chat,
}
"""The routes that prefill, and how each is read."""
