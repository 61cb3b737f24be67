"""Two pipeline stages, end to end: the first stage plans, both run the same batches, and every token is right."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from typing import Any

import http_load as load
import psutil
import pytest
from rounds import until_seen
from served import CHUNK, LAPS, SEVERAL, Prefill, Reference, Setup, ask, ids, in_progress, on

from benchmark.rig import servers

from . import slicing
from .slicing import came_amid, post, until_slices_run
from .through import generate, router

__all__ = ["router"]

MANY = "LAPS_PIPELINE_REQUESTS"
"""Environment variable: number of mixed requests (default: 60)."""
COUNT = int(os.environ.get(MANY, "60"))
STOPPED_S = 10.0 if MANY in os.environ else 2.0
PP2 = Setup("pp2", (*LAPS, "--pp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, group=SEVERAL)
pytestmark = [pytest.mark.timeout(600 + COUNT), *on(PP2)]
NEW = 4


def mixed(seed: int, count: int) -> list[list[int]]:
    """Return prompts: every sixth needs two to five chunks, and some share a prefix."""
    rng = random.Random(seed)
    document = ids(seed, CHUNK + 100)
    lengths = [rng.randint(CHUNK + 1, 5 * CHUNK) if i % 6 == 0 else rng.randint(4, 200) for i in range(count)]
    prompts = [ids(10_000 * seed + i, n) for i, n in enumerate(lengths)]
    return [document + p[:150] if i % 10 == 3 else p for i, p in enumerate(prompts)]


async def send(router: servers.Server, prompts: list[list[int]], seed: int) -> dict[int, list[int]]:
    """Send all prompts; every third client disconnects at a random time. Return the other clients' answers."""
    rng, said, at_once = random.Random(seed), {}, asyncio.Semaphore(24)
    plans = [(rng.random() * len(prompts) / 20, rng.choice((0.02, 0.1, 0.4, 1.5))) for _ in prompts]

    async def one(http: Any, i: int) -> None:
        at, stays_s = plans[i]
        await asyncio.sleep(at)
        async with at_once:
            with contextlib.suppress(TimeoutError):
                said[i] = await asyncio.wait_for(
                    generate(http, router, prompts[i], NEW), stays_s if i % 3 == 0 else 390.0
                )

    async with load.session() as http:
        await asyncio.gather(*(one(http, i) for i in range(len(prompts))))
    return said


def stages(prefill: Prefill) -> list[psutil.Process]:
    """Return the scheduler processes, in order of stages: SGLang starts these first."""
    started = psutil.Process(prefill.server.family()[-1].pid).children()
    return sorted((p for p in started if "resource_tracker" not in str(p.cmdline())), key=lambda p: p.pid)[:2]


def must_be_right(said: dict[int, list[int]], prompts: list[list[int]], reference: Reference) -> None:
    assert {i for i in range(len(prompts)) if i % 3} <= set(said)
    for i, answer in said.items():
        assert answer == reference.greedy(prompts[i], NEW), f"prompt {i} of {len(prompts[i])} tokens"


def test_the_status_says_why_there_are_no_slices(prefill: Prefill) -> None:
    status = prefill.get("/laps_status")
    assert (status["enabled"], status["slices"]["on"]) == (True, False)
    assert "pipeline" in status["slices"]["why_not"]


def test_mixed_requests_of_which_a_third_is_abandoned(
    router: servers.Server, prefill: Prefill, reference: Reference
) -> None:
    asyncio.run(send(router, mixed(1, 12), seed=1))  # one-time initializations are done
    prefill.all_tokens_are_free()
    held = [p.num_fds() for p in stages(prefill)]
    prompts = mixed(2, COUNT)
    said = asyncio.run(send(router, prompts, seed=2))
    must_be_right(said, prompts, reference)
    prefill.all_tokens_are_free()
    end = time.monotonic() + 120
    while any(now > before + 2 for now, before in zip((p.num_fds() for p in stages(prefill)), held, strict=True)):
        assert time.monotonic() < end, "descriptors are left"
        time.sleep(0.2)


def test_short_prompts_go_between_the_chunks_of_a_long_one(prefill: Prefill) -> None:
    async def scenario(i: int) -> bool:
        async with load.session() as http:
            long = asyncio.ensure_future(post(http, prefill, slicing.ask(ids(91 + 1000 * i, 8 * CHUNK))))
            await until_slices_run(http, prefill, long)
            bodies = [slicing.ask(ids(700 + 1000 * i + k, 40)) for k in range(4)]
            shorts = await asyncio.gather(*(post(http, prefill, body) for body in bodies))
            status, whole, done = await long
            assert [status, *(s for s, _, _ in shorts)] == [200] * 5, (whole, shorts)
            return all(came_amid(answer, whole) for _, answer, _ in shorts) and max(at for *_, at in shorts) < done

    until_seen(lambda i: asyncio.run(scenario(i)), "short prompts are answered between two chunks")


def test_a_prompt_that_is_aborted_is_not_computed_to_its_end(prefill: Prefill) -> None:
    async def scenario(i: int) -> None:
        async with load.session() as http:
            body = ask((1 << 40) + i, ids(93 + 1000 * i, 12 * CHUNK), rid=f"gone-{i}-x")
            sending = asyncio.ensure_future(http.post(prefill.server.url + "/generate", json=body))
            while not sending.done() and not await in_progress(http, prefill):
                pass
            async with http.post(prefill.server.url + "/abort_request", json={"rid": f"gone-{i}-x"}) as reply:
                assert reply.status == 200
            (await sending).close()

    def once(i: int) -> bool:
        before = prefill.totals()["long"]["tokens"]
        asyncio.run(scenario(i))
        prefill.all_tokens_are_free()
        return bool(prefill.totals()["long"]["tokens"] - before < 11 * CHUNK)

    until_seen(once, "an abort comes between two chunks")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_stands_still_for_a_while(
    router: servers.Server, prefill: Prefill, reference: Reference, stage: int
) -> None:
    prompts, process = mixed(3 + stage, 18), stages(prefill)[stage]

    async def scenario() -> dict[int, list[int]]:
        sending = asyncio.ensure_future(send(router, prompts, seed=3 + stage))
        await asyncio.sleep(0.4)
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            process.send_signal(signal.SIGCONT)
        return await sending

    must_be_right(asyncio.run(scenario()), prompts, reference)
    prefill.all_tokens_are_free()
