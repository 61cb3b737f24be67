"""What of a request body will be prefilled, for each route MiniLB serves."""

from __future__ import annotations

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


def read_prompt(endpoint: str, body: Mapping[str, Any]) -> Prompt:
    """Read what counts. A part of a type the server will refuse counts nothing: the refusal is the server's."""
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
    if isinstance(value, str):
        prompt.texts.append(value)
    elif isinstance(value, list) and value:
        if isinstance(value[0], int):
            prompt.ids.append(value)
        else:
            for one in value:
                if isinstance(one, (str, list)):
                    _take(prompt, one)


def _generate(body: Mapping[str, Any]) -> Prompt:
    prompt = Prompt()
    text = body.get("text")
    _take(prompt, body.get("input_ids") if text is None else text)
    for name in ("image_data", "video_data", "audio_data"):
        media = body.get(name)
        if media:
            prompt.media += len(media) if isinstance(media, list) else 1
    return prompt


def _completions(body: Mapping[str, Any]) -> Prompt:
    prompt = Prompt()
    _take(prompt, body.get("prompt"))
    return prompt


def _chat(body: Mapping[str, Any]) -> Prompt:
    prompt = Prompt()
    pieces: list[str] = []
    tools = body.get("tools")
    if tools:
        pieces.append(orjson.dumps(tools).decode())
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        prompt.messages += 1
        # The marker keeps the prefix of a conversation a prefix of its next turn, and roles apart.
        pieces.append(f"\n<{message.get('role')}>")
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            if isinstance(part, str):
                pieces.append(part)
            elif isinstance(part, dict):
                text = part.get("text")
                if isinstance(text, str):
                    pieces.append(text)
                elif part.get("type") != "text":
                    prompt.media += 1
        calls = message.get("tool_calls")
        if calls:
            pieces.append(orjson.dumps(calls).decode())
    prompt.texts.append("".join(pieces))
    return prompt


READERS: dict[str, Callable[[Mapping[str, Any]], Prompt]] = {
    GENERATE: _generate,
    COMPLETIONS: _completions,
    CHAT: _chat,
}
"""The routes that prefill, and how each is read."""
