"""Servers that prefill and decode: SGLang's further state of each stream (penalties, grammars, log-probabilities), and
prompts that are aborted while paused."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import http_load as load
import pytest
from rounds import until_seen
from served import LAPS, Prefill, Reference, Setup, ids, on, started

from .colocated import (
    FEATURES,
    SETUPS,
    Asked,
    alone,
    at_once,
    mixed,
    must_be_as,
    must_be_right,
    retractions,
    with_features,
)

pytestmark = [pytest.mark.timeout(600), *on(*SETUPS)]


def test_with_penalties_grammars_and_log_probabilities_streams_answer_as_a_stock_server_one_at_a_time(
    prefill: Prefill, tmp_path: Path
) -> None:
    asked = with_features(mixed(3, 18, f"features-{prefill.setup.name}", 1.0))
    asyncio.run(at_once(prefill, asked))
    prefill.all_tokens_are_free()
    own, at = prefill.setup, prefill.setup.args.index("--laps-config")
    flags = tuple(a for a in (*own.args[:at], *own.args[at + 2 :]) if a not in LAPS)
    with started(Setup(f"{own.name}-stock", flags, own.env, own.shape, mode=own.mode), tmp_path) as stock:
        must_be_as(asked, alone(stock, asked))
    bound = [a for a in asked if "regex" in a.sampling and a.end["type"] == "stop"]
    assert bound, [(a.sampling, a.text, a.end) for a in asked if a.sampling]
    assert all(re.fullmatch(a.sampling["regex"], a.text) for a in bound), [a.text for a in bound]


def test_scores_beside_streams_and_long_prompts_are_those_of_transformers(
    prefill: Prefill, reference: Reference
) -> None:
    name, labels = f"score-{prefill.setup.name}", [5, 700, 1500]
    others = [Asked(f"{name}-{i}-x", ids(600 + i, 60 if i < 2 else 2500), 60 if i < 2 else 4, 0.0) for i in range(4)]
    queries = [(ids(620 + i, n), [ids(640 + 2 * i, 20), ids(641 + 2 * i, 30)]) for i, n in enumerate((30, 1200, 200))]

    async def score(http: Any, query: list[int], items: list[list[int]]) -> list[list[float]]:
        body = {"query": query, "items": items, "label_token_ids": labels, "apply_softmax": False}
        async with http.post(prefill.server.url + "/v1/score", json={"model": "any", **body}) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return list(answer["scores"])

    async def scenario() -> list[list[list[float]]]:
        async with load.session() as http:
            beside = asyncio.ensure_future(at_once(prefill, others))
            scores = await asyncio.gather(*(score(http, *query) for query in queries))
            await beside
            return list(scores)

    for (query, items), scores in zip(queries, asyncio.run(scenario()), strict=True):
        for item, found in zip(items, scores, strict=True):
            with reference.torch.inference_mode():
                logits = reference.model(reference.torch.tensor([query + item]), logits_to_keep=1).logits[0, -1]
            assert found == pytest.approx(logits.softmax(-1)[labels].tolist(), rel=1e-3, abs=1e-6)
    must_be_right(others, reference)
    prefill.all_tokens_are_free()


def test_streams_that_are_retracted_keep_their_penalties_and_grammars(prefill: Prefill, reference: Reference) -> None:
    """Also in pauses: long prompts hold the memory that streams lack. Stock SGLang starts new penalty counts after a
    retraction; under LAPS a request gets the same answer as alone."""
    before = retractions(prefill)

    def once(i: int) -> bool:
        name, seed = f"counts-{i}-{prefill.setup.name}", 840 + 1000 * i
        # All at once, and so long that the first still runs when the last begins, unless the machine is busy.
        asked = [Asked(f"{name}-{i}-x", ids(seed + i, 380), 110, 0.0) for i in range(14)]
        for i, a in enumerate(asked):
            a.sampling = {"ignore_eos": False, **((*FEATURES, {"regex": "[a-z ]{200,300}"}, {})[i % 5])}
            if "min_new_tokens" in a.sampling:
                a.sampling["min_new_tokens"] = 100
        asked += [Asked(f"{name}-{i}-x", ids(seed + i, 1500), 4, 0.5 + i - 14) for i in range(14, 16)]
        asyncio.run(at_once(prefill, asked))
        prefill.all_tokens_are_free()
        plain = asked[4::5]
        must_be_right(plain, reference)
        other = [a for a in asked if a not in plain]
        must_be_as(other, alone(prefill, other, clients=5))
        prefill.all_tokens_are_free()
        return retractions(prefill) > before

    until_seen(once, "a stream is retracted")


def test_an_abort_ends_a_paused_prompt_at_its_next_pause(prefill: Prefill, reference: Reference) -> None:
    """The prompt's memory becomes free, no request reuses its incomplete KV as a prefix, and streams continue."""
    before = prefill.get("/laps_status")["decode"]["abandoned_passes"]

    def once(i: int) -> bool:
        rng, name, seed = random.Random(4), f"mid-pass-{i}-{prefill.setup.name}", 900 + 1000 * i
        streams = [Asked(f"{name}-stream-{i}-x", ids(seed + i, 100), 150, 0.0) for i in range(2)]
        streams[1].sampling = FEATURES[0]
        # Prompts of one chunk, and of several.
        prompts = [ids(seed + 10 + i, 950 if i % 2 else 2500) for i in range(24)]
        aborted = [
            Asked(f"{name}-{i}-x", p, 4, 0.1 + 0.1 * i, leaves_s=0.1 * rng.random(), aborts=True)
            for i, p in enumerate(prompts)
        ]
        asyncio.run(at_once(prefill, [*streams, *aborted]))
        abandoned = prefill.get("/laps_status")["decode"]["abandoned_passes"]
        must_be_right([*streams[:1], *aborted], reference)
        gone = [a for a in aborted if not a.tokens]
        assert all(a.end is None or a.end["type"] == "abort" for a in gone)
        # If prefixes of aborted prompts are cached, they are complete.
        must_be_right(alone(prefill, gone[:6]), reference)
        must_be_as(streams[1:], alone(prefill, streams[1:]))
        prefill.all_tokens_are_free()
        return abandoned > before and bool(gone)

    until_seen(once, "a prompt is aborted in a pause")
