"""Embedding servers: short texts do not wait behind long texts, which run in chunks; every vector is right."""

from __future__ import annotations

import asyncio
from typing import Any

import http_load as load
import pytest
from served import CHUNK, LAPS, Prefill, Reference, Setup, ids, on

pytestmark = on(Setup("embeddings", (*LAPS, "--is-embedding"), mode="null"))
SIZES = (10, 300, 3 * CHUNK, 40, 5 * CHUNK, 12, 4 * CHUNK)


def expected(reference: Reference, text: list[int]) -> Any:
    """Return the normalized state after the last token."""
    with reference.torch.inference_mode():
        state = reference.model.model(reference.torch.tensor([text])).last_hidden_state[0, -1]
    return (state / state.norm()).tolist()


async def embed(http: Any, prefill: Prefill, text: list[int]) -> list[float]:
    async with http.post(prefill.server.url + "/v1/embeddings", json={"model": "any", "input": text}) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        return list(answer["data"][0]["embedding"])


def test_texts_of_all_lengths_at_once_have_their_vectors(prefill: Prefill, reference: Reference) -> None:
    texts = [ids(i, n) for i, n in enumerate(SIZES)]

    async def scenario() -> list[list[float]]:
        async with load.session() as http:
            return list(await asyncio.gather(*(embed(http, prefill, text) for text in texts)))

    for text, vector in zip(texts, asyncio.run(scenario()), strict=True):
        assert vector == pytest.approx(expected(reference, text), abs=1e-4), f"{len(text)} tokens"
    prefill.all_tokens_are_free()


def test_a_short_text_is_embedded_before_a_long_one_that_came_first(prefill: Prefill) -> None:
    async def scenario() -> list[str]:
        done: list[str] = []
        async with load.session() as http:

            async def one(name: str, text: list[int], delay_s: float) -> None:
                await asyncio.sleep(delay_s)
                await embed(http, prefill, text)
                done.append(name)

            await asyncio.gather(one("long", ids(20, 12 * CHUNK), 0.0), one("short", ids(21, 20), 0.2))
        return done

    assert asyncio.run(scenario()) == ["short", "long"]
    status = prefill.get("/laps_status")
    assert (status["enabled"], status["slices"]["on"], status["decode"]["streams"]) == (True, False, 0)
    assert all(status["totals"][kind]["requests"] for kind in ("short", "long"))
    prefill.all_tokens_are_free()
