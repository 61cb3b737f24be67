"""Beam searches that lose their memory while they run, on servers that prefill and decode."""

from __future__ import annotations

import asyncio
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import Prefill, random_prompt, run_on

from .test_colocated_memory import PRIORITIES, RUNNING

pytestmark = [pytest.mark.timeout(600), *run_on(PRIORITIES)]
LONG, SHORT = 3000, 4
"""New tokens of a search that lasts until it is ended, and of one that ends by itself."""


async def search(http: Any, prefill: Prefill, seed: int, tokens: int) -> tuple[int, str]:
    """Search with as many beams as leave two rows free. Return status and text of the answer."""
    sampling = {"beam_width": RUNNING - 2, "max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": random_prompt(seed, 60), "sampling_params": sampling, "priority": 0}
    async with http.post(prefill.server.url + "/generate", json=body) as reply:
        return reply.status, await reply.text()


async def post(http: Any, prefill: Prefill, route: str, body: dict[str, Any]) -> None:
    async with http.post(prefill.server.url + route, json=body) as reply:
        assert reply.status == 200, await reply.text()


async def wait_until_running(http: Any, prefill: Prefill) -> None:
    running = 0
    while not running:
        async with http.get(prefill.server.url + "/v1/loads?include=core") as reply:
            running = sum(load["num_running_reqs"] for load in (await reply.json())["loads"])


def test_search_that_is_retracted_by_a_pause_ends_and_frees_its_rows(prefill: Prefill) -> None:
    async def scenario() -> None:
        async with load.session() as http:
            for i in range(3):  # the rows of two lost searches would be too many
                searching = asyncio.ensure_future(search(http, prefill, 9900 + i, LONG))
                await wait_until_running(http, prefill)
                await post(http, prefill, "/pause_generation", {"mode": "retract"})
                await post(http, prefill, "/continue_generation", {})
                status, text = await searching
                assert (status, "was retracted" in text) == (503, True), text
            assert (await search(http, prefill, 9910, SHORT))[0] == 200

    asyncio.run(scenario())
    prefill.require_all_tokens_free()


def test_search_that_makes_way_for_higher_priority_ends_and_frees_its_rows(prefill: Prefill) -> None:
    def attempt(i: int) -> bool:
        async def scenario() -> int:
            async with load.session() as http:
                searching = asyncio.ensure_future(search(http, prefill, 9920 + i, LONG))
                await wait_until_running(http, prefill)
                urgent = [
                    {
                        "input_ids": random_prompt(9930 + 10 * i + n, 30),
                        "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True},
                        "priority": 100,
                    }
                    for n in range(RUNNING)
                ]
                await asyncio.gather(*(post(http, prefill, "/generate", body) for body in urgent))
                return (await searching)[0]

        status = asyncio.run(scenario())
        assert status in (200, 503)
        prefill.require_all_tokens_free()
        return status == 503

    repeat_until(attempt, "the search makes way")
    assert asyncio.run(search_again(prefill)) == 200


async def search_again(prefill: Prefill) -> int:
    async with load.session() as http:
        return (await search(http, prefill, 9990, SHORT))[0]
