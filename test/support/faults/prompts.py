"""Small fixed set of prompts, so that the right answers are known before any fault."""

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
"""Share of answers with TALK_TOKENS tokens, long enough that faults hit their streams."""


@dataclass(frozen=True)
class Prompt:
    """Route and body (without ``stream``) of a greedy request with an answer of fixed length."""

    route: str
    body: dict[str, Any]


def make(seed: int, short: int, long: int) -> list[Prompt]:
    """Return ``short`` short and ``long`` long prompts, over all routes; equal for equal seeds."""
    rng = random.Random(seed)
    words = sorted({w for text in model.corpus() for w in text.split() if w.isalpha()})
    lengths = [SHORT_TOKENS] * short + [LONG_TOKENS] * long
    return [_one(rng, words, between, ROUTES[i % len(ROUTES)], i) for i, between in enumerate(lengths)]


def _one(rng: random.Random, words: Sequence[str], between: tuple[int, int], route: str, i: int) -> Prompt:
    tokens = rng.randint(*between)
    answer = rng.randint(*(TALK_TOKENS if rng.random() < TALKS else ANSWER_TOKENS))
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    asked: dict[str, Any]
    if route == GENERATE and i % 2:
        asked = {"input_ids": [rng.randrange(*model.VOCABULARY) for _ in range(tokens)]}
    else:
        text = " ".join(rng.choices(words, k=max(1, tokens // 2)))
        asked = {{GENERATE: "text", COMPLETIONS: "prompt", CHAT: "messages"}[route]: text}
    if route == CHAT:
        asked["messages"] = [{"role": "user", "content": text}]
    if route == GENERATE:
        return Prompt(route, {**asked, "sampling_params": {"max_new_tokens": answer, **greedy}})
    return Prompt(route, {"model": "m", "max_tokens": answer, **greedy, **asked})
