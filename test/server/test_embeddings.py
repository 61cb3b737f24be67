"""Embedding servers: short texts do not wait behind long texts, which run in chunks; every vector is right."""

from __future__ import annotations

import asyncio
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import CHUNK, LAPS, Prefill, Reference, Setup, count_in_progress, random_prompt, run_on

pytestmark = run_on(Setup("embeddings", (*LAPS, "--is-embedding"), mode="null"))
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


def test_concurrent_embeddings_equal_transformers(prefill: Prefill, reference: Reference) -> None:
    texts = [random_prompt(i, n) for i, n in enumerate(SIZES)]

    async def scenario() -> list[list[float]]:
        async with load.session() as http:
            return list(await asyncio.gather(*(embed(http, prefill, text) for text in texts)))

    for text, vector in zip(texts, asyncio.run(scenario()), strict=True):
        assert vector == pytest.approx(expected(reference, text), abs=1e-4), f"{len(text)} tokens"
    prefill.require_all_tokens_free()


def test_short_text_is_embedded_before_earlier_long_text(prefill: Prefill) -> None:
    async def scenario(i: int) -> bool:
        """Return True if the short text, sent while the long text was between two chunks, was embedded first."""
        async with load.session() as http:
            long = asyncio.ensure_future(embed(http, prefill, random_prompt(20 + 1000 * i, (12 + 4 * i) * CHUNK)))
            while not long.done() and not await count_in_progress(http, prefill):
                pass
            await embed(http, prefill, random_prompt(21 + 1000 * i, 20))
            first = not long.done()
            await long
            return first

    repeat_until(lambda i: asyncio.run(scenario(i)), "a short text is embedded between two chunks")
    status = prefill.get("/laps_status")
    assert (status["enabled"], status["slices"]["on"], status["decode"]["streams"]) == (True, False, 0)
    assert all(status["totals"][kind]["requests"] for kind in ("short", "long"))
    prefill.require_all_tokens_free()


@pytest.mark.parametrize(
    ("route", "body"),
    [("/generate", {"text": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_requests_for_text_are_refused(prefill: Prefill, route: str, body: dict[str, Any]) -> None:
    """SGLang's server would end."""
    code, said = prefill.post(route, {"model": "any", **body})
    assert (code, "no text" in said) == (400, True), said
