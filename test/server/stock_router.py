"""Prompts through a stock router, a prefill server and a decode server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from served import Prefill, SharedServers

from benchmark.rig import servers


@pytest.fixture(scope="module")
def router(
    prefill: Prefill, shared_servers: SharedServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Server]:
    """Run a router in front of the prefill server and a decode server."""
    decode = shared_servers.decode(tmp_path_factory)
    with servers.running(servers.minilb([prefill.server], [decode], tmp_path_factory.mktemp("router") / "log")) as (r,):
        yield r


async def generate(http: Any, router: servers.Server, prompt: list[int], new: int) -> list[int]:
    """Return the first `new` tokens of the answer to a prompt."""
    params = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    async with http.post(router.url + "/generate", json={"input_ids": prompt, "sampling_params": params}) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        return list(answer["output_ids"])
