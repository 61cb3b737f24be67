"""Servers that prefill and decode: SGLang's further state of each stream (penalties, grammars, log-probabilities), and
prompts that are aborted while paused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import LAPS, Prefill, Reference, Setup, random_prompt, run_on, run_prefill_server

from .colocated import (
    FEATURES,
    SETUPS,
    Request,
    add_features,
    count_retractions,
    mixed_requests,
    prompts_that_leave,
    require_equal_answers,
    require_right_answers,
    send_again,
    send_all_at_their_times,
)

pytestmark = [pytest.mark.timeout(600), *run_on(*SETUPS)]


def test_sampling_features_equal_sequential_answers_of_stock_server(prefill: Prefill, tmp_path: Path) -> None:
    requests = add_features(mixed_requests(3, 18, f"features-{prefill.setup.name}", 1.0))
    asyncio.run(send_all_at_their_times(prefill, requests))
    prefill.require_all_tokens_free()
    own, at = prefill.setup, prefill.setup.args.index("--laps-config")
    flags = tuple(a for a in (*own.args[:at], *own.args[at + 2 :]) if a not in LAPS)
    with run_prefill_server(Setup(f"{own.name}-stock", flags, own.env, own.shape, mode=own.mode), tmp_path) as stock:
        require_equal_answers(requests, send_again(stock, requests))
    bound = [a for a in requests if "regex" in a.sampling and a.end["type"] == "stop"]
    assert bound, [(a.sampling, a.text, a.end) for a in requests if a.sampling]
    assert all(re.fullmatch(a.sampling["regex"], a.text) for a in bound), [a.text for a in bound]


@pytest.mark.parametrize(("prompts", "n"), [([5, 6, 7], 66_000), ([[5], [6]], 33_000)])
def test_more_samples_than_server_can_make_are_refused(prefill: Prefill, prompts: list[Any], n: int) -> None:
    """SGLang starts to make them: with many more, its HTTP process would answer nobody until its memory is used up."""
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1, "n": n}}
    status, answer = prefill.post("/generate", body)
    assert (status, f"n: {n} samples" in answer) == (400, True), answer
    status, answer = prefill.post("/generate", {**body, "sampling_params": {"max_new_tokens": 1, "n": 2}})
    assert status == 200, answer


def test_scores_under_load_equal_transformers(prefill: Prefill, reference: Reference) -> None:
    name, labels = f"score-{prefill.setup.name}", [5, 700, 1500]
    others = [
        Request(f"{name}-{i}-x", random_prompt(600 + i, 60 if i < 2 else 2500), 60 if i < 2 else 4, 0.0)
        for i in range(4)
    ]
    queries = [
        (random_prompt(620 + i, n), [random_prompt(640 + 2 * i, 20), random_prompt(641 + 2 * i, 30)])
        for i, n in enumerate((30, 1200, 200))
    ]

    async def score(http: Any, query: list[int], items: list[list[int]]) -> list[list[float]]:
        body = {"query": query, "items": items, "label_token_ids": labels, "apply_softmax": False}
        async with http.post(prefill.server.url + "/v1/score", json={"model": "any", **body}) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return list(answer["scores"])

    async def scenario() -> list[list[list[float]]]:
        async with load.session() as http:
            beside = asyncio.ensure_future(send_all_at_their_times(prefill, others))
            scores = await asyncio.gather(*(score(http, *query) for query in queries))
            await beside
            return list(scores)

    for (query, items), scores in zip(queries, asyncio.run(scenario()), strict=True):
        for item, found in zip(items, scores, strict=True):
            with reference.torch.inference_mode():
                logits = reference.model(reference.torch.tensor([query + item]), logits_to_keep=1).logits[0, -1]
            assert found == pytest.approx(logits.softmax(-1)[labels].tolist(), rel=1e-3, abs=1e-6)
    require_right_answers(others, reference)
    prefill.require_all_tokens_free()


def test_retracted_streams_keep_penalties_and_grammars(prefill: Prefill, reference: Reference) -> None:
    """Also in pauses: long prompts hold the memory that streams lack. Stock SGLang starts new penalty counts after a
    retraction; under LAPS a request gets the same answer as alone."""
    before = count_retractions(prefill)

    def attempt(i: int) -> bool:
        name, seed = f"counts-{i}-{prefill.setup.name}", 840 + 1000 * i
        # All at once, and so long that the first still runs when the last begins, unless the machine is busy.
        requests = [Request(f"{name}-{i}-x", random_prompt(seed + i, 380), 110, 0.0) for i in range(14)]
        for i, a in enumerate(requests):
            a.sampling = {"ignore_eos": False, **((*FEATURES, {"regex": "[a-z ]{200,300}"}, {})[i % 5])}
            if "min_new_tokens" in a.sampling:
                a.sampling["min_new_tokens"] = 100
        requests += [Request(f"{name}-{i}-x", random_prompt(seed + i, 1500), 4, 0.5 + i - 14) for i in range(14, 16)]
        asyncio.run(send_all_at_their_times(prefill, requests))
        prefill.require_all_tokens_free()
        plain = requests[4::5]
        require_right_answers(plain, reference)
        other = [a for a in requests if a not in plain]
        require_equal_answers(other, send_again(prefill, other, clients=5))
        prefill.require_all_tokens_free()
        return count_retractions(prefill) > before

    repeat_until(attempt, "a stream is retracted")


def test_abort_ends_paused_prompt_at_next_pause(prefill: Prefill, reference: Reference) -> None:
    """The prompt's memory becomes free, no request reuses its incomplete KV as a prefix, and streams continue."""
    before = prefill.get("/laps_status")["decode"]["abandoned_passes"]

    def attempt(i: int) -> bool:
        name, seed = f"mid-pass-{i}-{prefill.setup.name}", 900 + 1000 * i
        streams = [Request(f"{name}-stream-{i}-x", random_prompt(seed + i, 100), 150, 0.0) for i in range(2)]
        streams[1].sampling = FEATURES[0]
        aborted = prompts_that_leave(name, seed + 10, i)
        asyncio.run(send_all_at_their_times(prefill, [*streams, *aborted]))
        abandoned = prefill.get("/laps_status")["decode"]["abandoned_passes"]
        require_right_answers([*streams[:1], *aborted], reference)
        gone = [a for a in aborted if not a.tokens]
        assert all(a.end is None or a.end["type"] == "abort" for a in gone)
        # If prefixes of aborted prompts are cached, they are complete.
        require_right_answers(send_again(prefill, gone[:6]), reference)
        require_equal_answers(streams[1:], send_again(prefill, streams[1:]))
        prefill.require_all_tokens_free()
        return abandoned > before and bool(gone)

    repeat_until(attempt, "a prompt is aborted in a pause")
