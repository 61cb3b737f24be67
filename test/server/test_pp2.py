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
from rounds import repeat_until
from served import (
    CHUNK,
    LAPS,
    SEVERAL_SERVERS,
    Prefill,
    Reference,
    Setup,
    count_in_progress,
    random_prompt,
    request_body,
    run_on,
)

from benchmark.rig import servers

from . import slicing
from .slicing import arrived_during, post, wait_until_slices_run
from .stock_router import generate, router

__all__ = ["router"]

COUNT_VARIABLE = "LAPS_PIPELINE_REQUESTS"
"""Environment variable: number of mixed requests (default: 60)."""
COUNT = int(os.environ.get(COUNT_VARIABLE, "60"))
STOPPED_S = 10.0 if COUNT_VARIABLE in os.environ else 2.0
PP2 = Setup("pp2", (*LAPS, "--pp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, group=SEVERAL_SERVERS)
pytestmark = [pytest.mark.timeout(600 + COUNT), *run_on(PP2)]
NEW = 4


def mixed_prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts: every sixth needs two to five chunks, and some share a prefix."""
    rng = random.Random(seed)
    document = random_prompt(seed, CHUNK + 100)
    lengths = [rng.randint(CHUNK + 1, 5 * CHUNK) if i % 6 == 0 else rng.randint(4, 200) for i in range(count)]
    prompts = [random_prompt(10_000 * seed + i, n) for i, n in enumerate(lengths)]
    return [document + p[:150] if i % 10 == 3 else p for i, p in enumerate(prompts)]


async def send(router: servers.Server, prompts: list[list[int]], seed: int) -> dict[int, list[int]]:
    """Send all prompts; every third client disconnects at a random time. Return the other clients' answers."""
    rng, said, semaphore = random.Random(seed), {}, asyncio.Semaphore(24)
    plans = [(rng.random() * len(prompts) / 20, rng.choice((0.02, 0.1, 0.4, 1.5))) for _ in prompts]

    async def one(http: Any, i: int) -> None:
        at, stays_s = plans[i]
        await asyncio.sleep(at)
        async with semaphore:
            with contextlib.suppress(TimeoutError):
                said[i] = await asyncio.wait_for(
                    generate(http, router, prompts[i], NEW), stays_s if i % 3 == 0 else 390.0
                )

    async with load.session() as http:
        await asyncio.gather(*(one(http, i) for i in range(len(prompts))))
    return said


def stage_processes(prefill: Prefill) -> list[psutil.Process]:
    """Return the scheduler processes, in order of stages: SGLang starts these first."""
    started = psutil.Process(prefill.server.family()[-1].pid).children()
    return sorted((p for p in started if "resource_tracker" not in str(p.cmdline())), key=lambda p: p.pid)[:2]


def require_right_answers(said: dict[int, list[int]], prompts: list[list[int]], reference: Reference) -> None:
    assert {i for i in range(len(prompts)) if i % 3} <= set(said)
    for i, answer in said.items():
        assert answer == reference.greedy(prompts[i], NEW), f"prompt {i} of {len(prompts[i])} tokens"


def test_status_reports_why_slices_are_off(prefill: Prefill) -> None:
    status = prefill.get("/laps_status")
    assert (status["enabled"], status["slices"]["on"]) == (True, False)
    assert "pipeline" in status["slices"]["why_not"]


def test_mixed_load_with_disconnects_is_correct_and_leaks_nothing(
    router: servers.Server, prefill: Prefill, reference: Reference
) -> None:
    asyncio.run(send(router, mixed_prompts(1, 12), seed=1))  # one-time initializations are done
    prefill.require_all_tokens_free()
    held = [p.num_fds() for p in stage_processes(prefill)]
    prompts = mixed_prompts(2, COUNT)
    said = asyncio.run(send(router, prompts, seed=2))
    require_right_answers(said, prompts, reference)
    prefill.require_all_tokens_free()
    end = time.monotonic() + 120
    while any(
        now > before + 2 for now, before in zip((p.num_fds() for p in stage_processes(prefill)), held, strict=True)
    ):
        assert time.monotonic() < end, "descriptors are left"
        time.sleep(0.2)


def test_short_prompts_run_between_chunks_of_long_prompt(prefill: Prefill) -> None:
    async def scenario(i: int) -> bool:
        async with load.session() as http:
            # On a slow machine short prompts take longer to arrive.
            tokens = (8 + 4 * i) * CHUNK
            long = asyncio.ensure_future(
                post(http, prefill, slicing.request_body(random_prompt(91 + 1000 * i, tokens)))
            )
            await wait_until_slices_run(http, prefill, long)
            bodies = [slicing.request_body(random_prompt(700 + 1000 * i + k, 40)) for k in range(4)]
            shorts = await asyncio.gather(*(post(http, prefill, body) for body in bodies))
            status, whole, done = await long
            assert [status, *(s for s, _, _ in shorts)] == [200] * 5, (whole, shorts)
            return all(arrived_during(answer, whole) for _, answer, _ in shorts) and max(at for *_, at in shorts) < done

    repeat_until(lambda i: asyncio.run(scenario(i)), "short prompts are answered between two chunks")


def test_aborted_prompt_is_not_computed_completely(prefill: Prefill) -> None:
    async def scenario(i: int) -> None:
        async with load.session() as http:
            body = request_body((1 << 40) + i, random_prompt(93 + 1000 * i, 12 * CHUNK), rid=f"gone-{i}-x")
            sending = asyncio.ensure_future(http.post(prefill.server.url + "/generate", json=body))
            while not sending.done() and not await count_in_progress(http, prefill):
                pass
            async with http.post(prefill.server.url + "/abort_request", json={"rid": f"gone-{i}-x"}) as reply:
                assert reply.status == 200
            (await sending).close()

    def attempt(i: int) -> bool:
        before = prefill.totals()["long"]["tokens"]
        asyncio.run(scenario(i))
        prefill.require_all_tokens_free()
        return bool(prefill.totals()["long"]["tokens"] - before < 11 * CHUNK)

    repeat_until(attempt, "an abort comes between two chunks")


@pytest.mark.parametrize("stage", [0, 1])
def test_stopped_pipeline_stage_resumes_with_correct_tokens(
    router: servers.Server, prefill: Prefill, reference: Reference, stage: int
) -> None:
    prompts, process = mixed_prompts(3 + stage, 18), stage_processes(prefill)[stage]

    async def scenario() -> dict[int, list[int]]:
        sending = asyncio.ensure_future(send(router, prompts, seed=3 + stage))
        await asyncio.sleep(0.4)
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            process.send_signal(signal.SIGCONT)
        return await sending

    require_right_answers(asyncio.run(scenario()), prompts, reference)
    prefill.require_all_tokens_free()
