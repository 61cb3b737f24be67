"""Servers that prefill and decode with memory kept beyond a request (HiCache prefixes on the host, sessions), or with
a limit of running requests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import http_load as load
import pytest
from rounds import until_seen
from served import HICACHE as PLUGIN
from served import LAPS, Prefill, Reference, Setup, ids, on

from benchmark.rig import devices

from .colocated import EVERY_PAUSE, LOOPS, Asked, at_once, mixed, must_be_right
from .slicing import SHAPE
from .test_slices_features import HICACHE, PAGES

RUNNING = 6
SETUPS = tuple(
    Setup(
        f"colocated-memory-{name}",
        (*LAPS, *EVERY_PAUSE, *HICACHE, "--enable-streaming-session", "--max-running-requests", str(RUNNING), *flags),
        devices.with_path({}, PLUGIN),
        SHAPE,
        mode="null",
    )
    for name, flags in LOOPS.items()
)
WINDOWS = Setup(
    "colocated-memory-windows",
    (*LAPS, *EVERY_PAUSE, *HICACHE, *PAGES),
    devices.with_path({}, PLUGIN),
    "gptoss",
    mode="null",
)
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("clean")]


def steps_in_pauses(prefill: Prefill) -> int:
    status = prefill.get("/laps_status")
    assert status["enabled"], status["reason"]
    return int(status["decode"]["steps_in_pauses"])


async def until_all_ended(prefill: Prefill, running: asyncio.Future[Any]) -> int:
    """Wait for ``running``; return the largest number of running requests that the server has reported meanwhile."""
    most = 0
    async with load.session() as http:
        while not running.done():
            async with http.get(prefill.server.url + "/v1/loads?include=core") as reply:
                most = max(most, *(x["num_running_reqs"] for x in (await reply.json())["loads"]))
            await asyncio.sleep(0.05)
    await running
    return most


@on(*SETUPS, WINDOWS)[0]
def test_prefixes_come_back_from_the_host_while_streams_go_on(prefill: Prefill, reference: Reference) -> None:
    before = steps_in_pauses(prefill)

    def once(i: int) -> bool:
        seed, name = 2000 + 100 * i, f"host-{i}-{prefill.setup.name}"
        documents = [ids(seed + i, 1400) for i in range(6)]
        kept = [Asked(f"{name}-kept-{i}-x", d, 1, 0.2 * i) for i, d in enumerate(documents)]
        # More than the device holds, so that the documents stay on the host only.
        others = [Asked(f"{name}-other-{i}-x", ids(seed + 20 + i, 2400), 1, 2.0 + 0.2 * i) for i in range(3)]
        asyncio.run(at_once(prefill, [*kept, *others]))
        asked = [Asked(f"{name}-stream-{i}-x", ids(seed + 30 + i, 60), 150, 0.0) for i in range(2)]
        for i, document in enumerate(documents):
            prompt = document + ids(seed + 40 + i, 1200 if i % 2 else 30)
            asked.append(Asked(f"{name}-again-{i}-x", prompt, 6, 0.3 + 0.3 * i))
        for a in asked[3::3]:
            a.leaves_s, a.aborts = 0.2, True
        asyncio.run(at_once(prefill, asked))
        must_be_right([*kept, *others, *asked], reference)
        assert sum(a.cached["host"] >= 1300 for a in asked if a.cached) >= 2, [a.cached for a in asked]
        prefill.all_tokens_are_free()
        return steps_in_pauses(prefill) > before

    until_seen(once, "a step runs in a pause")


@on(*SETUPS)[0]
@pytest.mark.parametrize("streaming", [False, True])
def test_turns_of_sessions_go_on_from_what_was_said(prefill: Prefill, reference: Reference, streaming: bool) -> None:
    before = steps_in_pauses(prefill)

    async def talk(http: Any, name: str, seed: int) -> list[Asked]:
        """Run three turns of one session. Return each turn with its whole prompt, history included."""
        body = {"capacity_of_str_len": 100_000, "session_id": name, "streaming": streaming}
        async with http.post(prefill.server.url + "/open_session", json=body) as reply:
            assert reply.status == 200, await reply.text()
        rng, said, turns = random.Random(seed), list[int](), list[Asked]()
        for n in range(3):
            new = ids(seed + n, rng.choice((30, 400, 1100)) if n else 900)
            turn = Asked(f"{name}-{n}-x", new, 20, 0.1 * rng.random())
            turn.session = {"id": name, "rid": turns[-1].rid if turns and not streaming else None}
            await turn.come(http, prefill.server.url)
            said += new
            turns.append(Asked(turn.rid, list(said), turn.new, 0.0, tokens=turn.tokens, end=turn.end))
            said += turn.tokens
        async with http.post(prefill.server.url + "/close_session", json={"session_id": name}) as reply:
            assert reply.status == 200, await reply.text()
        return turns

    async def scenario(i: int) -> list[Asked]:
        name = f"session-{streaming}-{i}-{prefill.setup.name}"
        others = mixed(3000 + i, 10, f"{name}-beside", 2.0)
        async with load.session() as http:
            talks = [talk(http, f"{name}-{k}", 4000 + 100 * i + 10 * k) for k in range(3)]
            beside = asyncio.ensure_future(at_once(prefill, others))
            said = await asyncio.gather(*talks)
            await beside
        return [*others, *(turn for turns in said for turn in turns)]

    def once(i: int) -> bool:
        must_be_right(asyncio.run(scenario(i)), reference)
        prefill.all_tokens_are_free()
        return steps_in_pauses(prefill) > before

    until_seen(once, "a step runs in a pause")


@on(*SETUPS)[0]
def test_no_more_requests_run_than_may(prefill: Prefill, reference: Reference) -> None:
    """The limit counts short batches in a pause together with paused and decoded requests."""
    asked = mixed(6, 30, f"limit-{prefill.setup.name}", 1.0)

    async def scenario() -> int:
        return await until_all_ended(prefill, asyncio.ensure_future(at_once(prefill, asked)))

    most = asyncio.run(scenario())
    must_be_right(asked, reference)
    assert RUNNING - 2 <= most <= RUNNING
    prefill.all_tokens_are_free()
