"""A long request that needs much memory, among short requests that take all memory that becomes free."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import http_load as load
import pytest
from served import LAPS, Prefill, Setup, random_prompt, request_body, run_on

SMALL = Setup(
    "small-memory",
    (*LAPS, "--max-total-tokens", "4096", "--chunked-prefill-size", "2048", "--laps-wait-window-ms", "0"),
)
"""Servers; in the overlap loop a short batch is built while another batch still holds its memory."""
pytestmark = run_on(SMALL)
ENOUGH = 1500
"""Short requests after which the stream ends, if the long request does not start before."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("aborted", [False, True])
def test_long_request_starts_under_stream_of_short_requests(prefill: Prefill, aborted: bool) -> None:
    """Eight short requests fill a batch and half of the memory; the long request needs three quarters of the memory."""
    rng = random.Random(7)
    served, enough = 0, 2 * ENOUGH if aborted else ENOUGH
    done = asyncio.Event()

    async def shorts(http: Any, n: int) -> None:
        nonlocal served
        while not done.is_set() and served < enough:
            prompt = [rng.randrange(3, 2000) for _ in range(250)]
            async with http.post(
                prefill.server.url + "/generate", json=request_body(rng.getrandbits(60), prompt)
            ) as reply:
                assert reply.status == 200
                await reply.read()
            served += 1

    async def waiting(http: Any) -> int:
        async with http.get(prefill.server.url + "/laps_status") as reply:
            depth: int = (await reply.json())["queues"]["long"]["depth"]
            return depth

    def asking(http: Any, rid: str) -> Any:
        return http.post(
            prefill.server.url + "/generate", json=request_body(rng.getrandbits(60), random_prompt(1, 3000), rid)
        )

    async def one_that_waits(http: Any) -> tuple[str, asyncio.Future[Any]]:
        """Send long requests until one waits; only a request that waits for memory can be aborted there."""
        for i in range(30):
            asked = asyncio.ensure_future(asking(http, f"in-vain-{i}"))
            while not asked.done():
                if await waiting(http):
                    return f"in-vain-{i}", asked
            async with await asked as reply:
                assert reply.status == 200, await reply.text()
        raise AssertionError("none waits")

    async def long(http: Any) -> int:
        nonlocal enough
        while served < 64:  # the stream flows
            await asyncio.sleep(0.01)
        before = served
        if aborted:
            rid, asked = await one_that_waits(http)
            async with http.post(prefill.server.url + "/abort_request", json={"rid": rid}) as reply:
                assert reply.status == 200
            async with await asked:
                pass
            before, enough = served, served + ENOUGH
            while served < before + 64:  # the stream flows on
                await asyncio.sleep(0.01)
        else:
            async with asking(http, "needs-much") as reply:
                assert reply.status == 200, await reply.text()
        done.set()
        return served - before

    async def scenario() -> int:
        async with load.session() as http:
            streams = [asyncio.ensure_future(shorts(http, n)) for n in range(32)]
            passed = await asyncio.wait_for(long(http), 350)
            await asyncio.gather(*streams)
            return passed

    assert asyncio.run(scenario()) < ENOUGH // 2
    prefill.require_all_tokens_free()
