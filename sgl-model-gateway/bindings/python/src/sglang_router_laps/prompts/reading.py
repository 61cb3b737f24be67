"""What of a request body will be prefilled, for each route MiniLB serves."""

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
"""What an answer is expected to have at most: most have fewer than they were allowed."""
APART = ("lora_path", "extra_key", "cache_salt")
"""What of a body is part of a prefix's identity, beside its tokens."""


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
    seed: int = 0
    """Of what keeps the prefix caches of prompts apart whose tokens are the same; 0 = nothing."""
    unread: bool = False
    """Not all of it could be read: its length is unknown."""
    measured: int | None = None
    """What a counter can learn from, once it has counted: tokens of texts and ids, or bytes of texts alone."""


def read_prompt(endpoint: str, body: Mapping[str, Any]) -> Prompt:
    """Read what counts. What cannot be read is marked as such: whether it is an error the server will say."""
    prompt = Prompt(seed=_seed(body))
    READERS[endpoint](prompt, body)
    return prompt


def _seed(body: Mapping[str, Any]) -> int:
    """An adapter computes other KV, and a salt is there to keep caches apart."""
    model = body.get("model")
    apart = [body.get(name) for name in APART]
    # SGLang takes an adapter behind the model's name as well.
    apart.append(model if isinstance(model, str) and ":" in model else None)
    return hash(repr(apart)) if any(apart) else 0


def answer_tokens(body: Mapping[str, Any]) -> int:
    """How long an answer to expect: what is asked for at most, where that is less than usual."""
    sampling = body.get("sampling_params")
    asked: Any = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    asked = asked or body.get("max_completion_tokens") or body.get("max_tokens")
    return min(asked, ANSWER_TOKENS) if type(asked) is int and asked > 0 else ANSWER_TOKENS


def batch_size(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """Into how many requests SGLang splits ``body``, each with an id of its own; None: it stays one."""
    prompts = body.get("prompt") if endpoint == COMPLETIONS else None
    if endpoint == GENERATE:
        text = body.get("text")
        if text is not None:
            return len(text) if isinstance(text, list) else None
        prompts = body.get("input_ids")
        if prompts is None:
            # Rows of numbers are one prompt.
            match body.get("input_embeds"):
                case [[[*_], *_], *_] as prompts:
                    pass
    return len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else None


def _take(prompt: Prompt, value: Any, *, batch: bool = True) -> None:
    """One prompt, or a list of prompts where it may be a ``batch``."""
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
            # Of a batch each prompt has a list of its own.
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
    """How many pieces there are up to each."""
    if body.get("tools"):
        pieces.append(_dump(prompt, body["tools"]))
    for message in messages:
        if not isinstance(message, dict):
            prompt.unread = True
            continue
        prompt.messages += 1
        role = message.get("role")
        # The marker keeps the prefix of a conversation a prefix of its next turn, and roles apart.
        pieces.append(f"\n<{role if isinstance(role, str) else None}>")
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                pieces.append(text)
            elif not isinstance(part, dict):
                prompt.unread |= part is not None
            elif part.get("type") != "text":
                # A marker keeps prompts with different images apart: the text before them may be the same.
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
    """Bytes of ``text`` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


READERS: dict[str, Callable[[Prompt, Mapping[str, Any]], None]] = {
    GENERATE: _generate,
    COMPLETIONS: lambda prompt, body: _take(prompt, body.get("prompt")),
    CHAT: _chat,
}
"""The routes that prefill, and how each is read."""
