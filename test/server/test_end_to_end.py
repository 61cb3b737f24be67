"""Router, prefill server, Mooncake over TCP and decode server together: answers equal those of transformers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import http_load as load
import pytest
from served import CHUNK, NORMAL, OVERLAP, STOCK, Prefill, Reference, random_prompt, run_on

from benchmark.rig import servers

from .stock_router import generate, router

__all__ = ["router"]

pytestmark = run_on(STOCK, OVERLAP, NORMAL)
NEW = 8


def ask_all(router: servers.Server, prompts: list[list[int]]) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with load.session() as http:
            return list(await asyncio.gather(*(generate(http, router, p, NEW) for p in prompts)))

    return asyncio.run(run())


def test_sequential_prompts_equal_transformers(router: servers.Server, reference: Reference) -> None:
    for tokens in (5, 60, 256, 257, CHUNK, 3 * CHUNK + 1, 2000):
        prompt = random_prompt(tokens, tokens)
        assert ask_all(router, [prompt]) == [reference.greedy(prompt, NEW)], tokens


def test_concurrent_prompts_equal_transformers(router: servers.Server, reference: Reference) -> None:
    prompts = [random_prompt(500 + i, 1300 if i % 5 == 0 else 20 + 9 * i) for i in range(20)]
    answers = ask_all(router, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference.greedy(prompt, NEW), len(prompt)


def test_conversation_turns_are_correct_and_reuse_history(
    router: servers.Server, prefill: Prefill, reference: Reference
) -> None:
    history = random_prompt(77, 2 * CHUNK)
    before = prefill.get("/laps_status")["totals"] if prefill.laps else None
    for turn in range(3):
        answer = ask_all(router, [history])[0]
        assert answer == reference.greedy(history, NEW), turn
        history = [*history, *answer, *random_prompt(80 + turn, 30)]
    if before is None:
        return
    after = prefill.totals()
    # The first turn is completely new; each later turn adds some forty tokens to a cached history.
    assert after["long"]["tokens"] - before["long"]["tokens"] == 2 * CHUNK
    assert after["short"]["requests"] - before["short"]["requests"] == 2
    assert after["short"]["tokens"] - before["short"]["tokens"] <= 2 * (NEW + 30 + 1)


def test_flushed_history_is_classified_long_again(router: servers.Server, prefill: Prefill) -> None:
    if not prefill.laps:
        pytest.skip("stock server")
    history = random_prompt(78, 2 * CHUNK)
    ask_all(router, [history])
    prefill.require_all_tokens_free()
    before = prefill.totals()
    ask_all(router, [[*history, 7]])
    assert prefill.totals()["long"]["tokens"] - before["long"]["tokens"] == len(history) + 1


def test_concurrent_questions_on_new_document_become_short(router: servers.Server, prefill: Prefill) -> None:
    if not prefill.laps:
        pytest.skip("stock server")
    document = random_prompt(79, 2 * CHUNK)
    before = prefill.totals()
    ask_all(router, [document + random_prompt(600 + i, 20) for i in range(6)])
    after = prefill.totals()
    assert after["short"]["requests"] - before["short"]["requests"] >= 4
    computed = sum(after[c]["tokens"] - before[c]["tokens"] for c in ("short", "long"))
    assert computed < 3 * len(document)


def test_streamed_chat_text_equals_transformers(router: servers.Server, reference: Reference) -> None:
    messages = [{"role": "user", "content": "Which requests are short?"}]
    body = {"model": "m", "messages": messages, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}

    async def run() -> load.RequestRecord:
        async with load.session() as http:
            return await load.stream(http, router.url + "/v1/chat/completions", body, "chat", 0.0)

    seen = asyncio.run(run())
    prompt: Any = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert seen.error is None
    assert seen.text == reference.tokenizer.decode(reference.greedy(prompt, NEW))


def test_abandoned_requests_free_all_prefill_tokens(router: servers.Server, prefill: Prefill) -> None:
    """Clients abandon half of all requests at random ages."""
    rng = random.Random(5)

    async def one(http: Any, i: int) -> bool:
        await asyncio.sleep(rng.random() * 2.0)
        call = generate(http, router, random_prompt(900 + i, 900 if i % 8 == 0 else rng.randint(5, 150)), NEW)
        try:
            await asyncio.wait_for(call, rng.choice((0.01, 0.05, 0.2)) if i % 2 else 390.0)
        except TimeoutError:
            assert i % 2
            return False
        return True

    async def run() -> list[bool]:
        async with load.session() as http:
            return list(await asyncio.gather(*(one(http, i) for i in range(60))))

    assert sum(asyncio.run(run())) >= 30
    prefill.require_all_tokens_free()
