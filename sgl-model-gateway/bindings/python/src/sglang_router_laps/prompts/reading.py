"""Reading of prompts from request bodies, for each generating route of MiniLB."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import orjson

GENERATE = "generate"
COMPLETIONS = "v1/completions"
CHAT = "v1/chat/completions"
ANSWER_TOKENS = 512
"""Longest answer assumed (tokens): most answers are shorter than the client's limit."""
APART = ("lora_path", "extra_key", "cache_salt")
"""Members of a body that keep prefix caches apart, even for equal tokens."""


@dataclass(slots=True)
class Prompt:
    """Prompts of one request; a batch has several."""

    texts: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    messages: int = 0
    """Number of chat messages; the chat template adds a few tokens to each message."""
    media: int = 0
    """Number of image, video and audio parts."""
    media_at: list[int] = field(default_factory=list)
    """End of each such part in the text (bytes of UTF-8); empty if unknown."""
    seed: int = 0
    """Hash of adapter, extra key and cache salt, which keep prefix caches of equal tokens apart; 0 = none given."""
    unread: bool = False
    """True if a part could not be read, so that the length is unknown."""
    measured: int | None = None
    """Size from which the counter can learn: tokens of texts and ids, or bytes of texts alone; None if unknown."""


def read_prompt(endpoint: str, body: Mapping[str, Any]) -> Prompt:
    """Return the prompts of a body. Unreadable parts set ``unread``: the server decides whether they are an error."""
    prompt = Prompt(seed=_seed(body))
    READERS[endpoint](prompt, body)
    return prompt


def _seed(body: Mapping[str, Any]) -> int:
    """Return a hash of adapter, extra key and cache salt, which keep prefix caches apart; 0 = none given."""
    model = body.get("model")
    apart = [body.get(name) for name in APART]
    # SGLang also accepts an adapter in the model's name, after a colon.
    apart.append(model if isinstance(model, str) and ":" in model else None)
    return hash(repr(apart)) if any(apart) else 0


def answer_tokens(body: Mapping[str, Any]) -> int:
    """Return the expected length of the answer (tokens): the client's limit, but at most ANSWER_TOKENS."""
    sampling = body.get("sampling_params")
    asked: Any = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    asked = asked or body.get("max_completion_tokens") or body.get("max_tokens")
    return min(asked, ANSWER_TOKENS) if type(asked) is int and asked > 0 else ANSWER_TOKENS


def batch_size(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """Return the number of requests that SGLang splits ``body`` into, each with its own id; None if not split."""
    prompts = body.get("prompt") if endpoint == COMPLETIONS else None
    if endpoint == GENERATE:
        text = body.get("text")
        if text is not None:
            return len(text) if isinstance(text, list) else None
        prompts = body.get("input_ids")
        if prompts is None:
            # A list of rows of numbers is a single prompt; a list of such lists is a batch.
            match body.get("input_embeds"):
                case [[[*_], *_], *_] as prompts:
                    pass
    return len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else None


def _take(prompt: Prompt, value: Any, *, batch: bool = True) -> None:
    """Add ``value`` to ``prompt``: a single prompt or, if ``batch`` is allowed, a list of prompts."""
    if isinstance(value, str):
        prompt.texts.append(value)
    elif isinstance(value, list) and set(map(type, value)) == {int}:
        prompt.ids.append(value)
    elif isinstance(value, list) and batch:
        for one in value:
            _take(prompt, one, batch=False)
    else:
        prompt.unread = True


def _generate(prompt: Prompt, body: Mapping[str, Any]) -> None:
    text = body.get("text")
    _take(prompt, body.get("input_ids") if text is None else text)
    for name in ("image_data", "video_data", "audio_data"):
        media = body.get(name)
        if isinstance(media, list):
            # In a batch each prompt has its own list.
            prompt.media += sum(len(one) if isinstance(one, list) else 1 for one in media)
        elif media:
            prompt.media += 1


def _chat(prompt: Prompt, body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        prompt.unread = True
        return
    pieces: list[str] = []
    media: list[int] = []
    """Number of pieces up to the end of each media part."""
    if body.get("tools"):
        pieces.append(_dump(prompt, body["tools"]))
    for message in messages:
        if not isinstance(message, dict):
            prompt.unread = True
            continue
        prompt.messages += 1
        role = message.get("role")
        # The marker separates roles. A conversation's text stays a prefix of the text of its next turn.
        pieces.append(f"\n<{role if isinstance(role, str) else None}>")
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                pieces.append(text)
            elif not isinstance(part, dict):
                prompt.unread |= part is not None
            elif part.get("type") != "text":
                # The marker distinguishes prompts with the same text and different media.
                pieces.append(f"\n<media {hash(_dump(prompt, part)):x}>")
                media.append(len(pieces))
        if message.get("tool_calls"):
            pieces.append(_dump(prompt, message["tool_calls"]))
    prompt.texts.append("".join(pieces))
    if media:
        ends = list(accumulate(map(utf8_len, pieces)))
        prompt.media, prompt.media_at = len(media), [ends[n - 1] for n in media]


def _dump(prompt: Prompt, value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        pass
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        prompt.unread = True
        return ""


def utf8_len(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


READERS: dict[str, Callable[[Prompt, Mapping[str, Any]], None]] = {
    GENERATE: _generate,
    COMPLETIONS: lambda prompt, body: _take(prompt, body.get("prompt")),
    CHAT: _chat,
}
"""Reader of each generating route."""
