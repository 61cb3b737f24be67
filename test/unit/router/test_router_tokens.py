"""Learned estimate of a prompt's tokens, and detection of media in a prompt."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang_router")

from sglang_router_laps.prompts.reading import CHAT, COMPLETIONS, GENERATE, batch_size, read_prompt
from sglang_router_laps.prompts.tokens import ByteCounter


def test_bytes_per_token_estimate_favors_recent_prompts() -> None:
    counter = ByteCounter()
    for size, ratio in ((100_000, 2.0), (300_000, 4.667)):
        prompt = read_prompt(GENERATE, {"text": "a" * size})
        counter.count(prompt)
        counter.learn(prompt, 50_000)
        assert counter.as_dict()["bytes_per_token"] == {"text": ratio, "chat": 4.0}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"text": "a" * 6000}, 0),
        ({"text": "a" * 6000, "image_data": "x"}, 100),
        ({"text": ["a" * 6000, 7]}, 100),
        ({"text": "", "input_ids": [1, 2]}, 100),
    ],
)
def test_byte_counter_ignores_uninformative_prompts(body: dict[str, Any], tokens: int) -> None:
    counter = ByteCounter()
    before = counter.as_dict()
    prompt = read_prompt(GENERATE, body)
    counter.count(prompt)
    counter.learn(prompt, tokens)
    assert counter.as_dict() == before


@pytest.mark.parametrize(
    ("endpoint", "body", "prompts"),
    [
        (GENERATE, {"text": ["a", "b", "c"]}, 3),
        (GENERATE, {"text": "a", "input_ids": [[1], [2]]}, None),
        (GENERATE, {"input_ids": [[1], [2]]}, 2),
        (GENERATE, {"input_ids": [1, 2]}, None),
        (GENERATE, {"input_ids": []}, None),
        (GENERATE, {"input_ids": "ab"}, None),
        (GENERATE, {}, None),
        (COMPLETIONS, {"text": ["a", "b", "c"], "prompt": ["a", "b"]}, 2),
    ],
)
def test_batch_size_counts_prompts(endpoint: str, body: dict[str, Any], prompts: int | None) -> None:
    assert batch_size(endpoint, body) == prompts


def test_media_are_counted_and_located() -> None:
    body = {"text": ["a", "b"], "image_data": [["x", "y"], ["z"]], "video_data": "v", "audio_data": ["u", "w"]}
    assert read_prompt(GENERATE, body).media == 6
    image = {"type": "image_url", "image_url": {"url": "x"}}
    parts = [{"type": "text", "text": "caf\xe9"}, image, {"type": "text", "text": "and"}, image]
    prompt = read_prompt(CHAT, {"messages": [{"role": "user", "content": parts}]})
    (text,) = prompt.texts
    first = text.index("and")
    assert prompt.media_at == [len(text[:first].encode()), len(text.encode())]
