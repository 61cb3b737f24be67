"""A small fixed set of prompts, so that the right answer of each is known before anything goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.rig import model

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
ROUTES = (GENERATE, COMPLETIONS, CHAT)
SHORT_TOKENS, LONG_TOKENS = (4, 60), (300, 900)
ANSWER_TOKENS = (1, 12)
TALK_TOKENS = (32, 96)
TALKS = 0.2
"""Share of answers that long: so that faults find some that stream."""


@dataclass(frozen=True)
class Prompt:
    """A route and a body without ``stream``; greedy, of a fixed length."""

    route: str
    body: dict[str, Any]
    length_class: str


def make(seed: int, short: int, long: int) -> list[Prompt]:
    """So many short and long prompts, over all routes. The same seed gives the same ones."""
    rng = random.Random(seed)
    words = sorted({w for text in model.corpus() for w in text.split() if w.isalpha()})
    kinds = ["short"] * short + ["long"] * long
    return [_one(rng, words, kind, ROUTES[i % len(ROUTES)], i) for i, kind in enumerate(kinds)]


def _one(rng: random.Random, words: Sequence[str], kind: str, route: str, i: int) -> Prompt:
    tokens = rng.randint(*(SHORT_TOKENS if kind == "short" else LONG_TOKENS))
    answer = rng.randint(*(TALK_TOKENS if rng.random() < TALKS else ANSWER_TOKENS))
    if route == GENERATE and i % 2:
        params = {"max_new_tokens": answer, "temperature": 0, "ignore_eos": True}
        return Prompt(
            route,
            {"input_ids": [rng.randrange(*model.VOCABULARY) for _ in range(tokens)], "sampling_params": params},
            kind,
        )
    text = " ".join(rng.choices(words, k=max(1, tokens // 2)))
    if route == GENERATE:
        params = {"max_new_tokens": answer, "temperature": 0, "ignore_eos": True}
        return Prompt(route, {"text": text, "sampling_params": params}, kind)
    body: dict[str, Any] = {"model": "m", "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    if route == COMPLETIONS:
        return Prompt(route, {**body, "prompt": text}, kind)
    return Prompt(route, {**body, "messages": [{"role": "user", "content": text}]}, kind)
