"""Decode servers that allocate a prompt's memory only after its prefill; until then the prefill server keeps its KV."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import http_load as load
import pytest
from rounds import repeat_until
from served import CHUNK, SEVERAL_SERVERS, Prefill, Reference, make_checkpoint, random_prompt, run_on

from benchmark.rig import servers

from .slicing import SHAPE, count_preemptions, slicing_setup
from .stock_router import generate

NEW = 8
LATE = ("--disaggregation-decode-allocation-policy", "prefill_complete")
pytestmark = run_on(replace(slicing_setup("late-room", *LATE), group=SEVERAL_SERVERS))


@pytest.fixture(scope="module")
def router(prefill: Prefill, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    folder = tmp_path_factory.mktemp("late")
    decode = servers.decode(make_checkpoint(SHAPE), folder / "decode", "--max-total-tokens", "65536", *LATE)
    balancer = servers.minilb([prefill.server], [decode], folder / "router")
    with servers.running(decode), servers.running(balancer):
        yield balancer


def test_late_decode_allocation_keeps_answers_correct_and_frees_memory(
    router: servers.Server, prefill: Prefill, reference: Reference
) -> None:
    """Prompts are started, parked and preempted before a decode server knows them; some clients disconnect then."""
    left = range(8, 20, 3)

    async def scenario(prompts: list[list[int]]) -> list[list[int] | None]:
        async def one(i: int) -> list[int] | None:
            await asyncio.sleep(0.05 * i)
            try:
                return await asyncio.wait_for(generate(http, router, prompts[i], NEW), 0.2 if i in left else 390.0)
            except TimeoutError:
                assert i in left
                return None

        async with load.session() as http:
            return list(await asyncio.gather(*map(one, range(len(prompts)))))

    def attempt(i: int) -> bool:
        seed = 500 + 1000 * i
        prompts = [random_prompt(seed + i, 3 * CHUNK + 40 * i if i % 4 == 0 else 20 + 9 * i) for i in range(24)]
        for i, answer in enumerate(asyncio.run(scenario(prompts))):
            assert answer == reference.greedy(prompts[i], NEW) or (i in left and answer is None), i
        prefill.require_all_tokens_free()
        return count_preemptions(prefill) > 0

    repeat_until(attempt, "a batch preempts")
