"""Servers that prefill and decode without a prefix cache, on which SGLang checks the KV memory after each batch."""

from __future__ import annotations

import asyncio

import http_load as load
import pytest
from rounds import repeat_until
from served import LAPS, Prefill, Reference, Setup, random_prompt, run_on

from .colocated import (
    FREQUENT_PAUSES,
    Request,
    mixed_requests,
    require_right_answers,
    send_all_at_their_times,
    serve_until_pauses_are_used,
    serve_until_streams_are_retracted,
)
from .slicing import SHAPE

POOL = int(FREQUENT_PAUSES[FREQUENT_PAUSES.index("--max-total-tokens") + 1])
SETUP = Setup(
    "colocated-no-cache",
    (*LAPS, *FREQUENT_PAUSES, "--disable-radix-cache"),
    {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
    SHAPE,
    mode="null",
)
pytestmark = [pytest.mark.timeout(600), *run_on(SETUP)]


def test_tokens_are_correct_and_memory_is_freed(prefill: Prefill, reference: Reference) -> None:
    serve_until_pauses_are_used(prefill, reference)


def test_streams_are_retracted_when_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    serve_until_streams_are_retracted(prefill, reference)


def test_memory_of_parked_prompts_is_accounted_for(prefill: Prefill, reference: Reference) -> None:
    async def scenario(requests: list[Request]) -> bool:
        running, seen = asyncio.ensure_future(send_all_at_their_times(prefill, requests)), False
        async with load.session() as http:
            while not running.done():
                async with http.get(prefill.server.url + "/laps_status") as reply:
                    seen |= (await reply.json())["parked"] is not None
        await running
        return seen

    def attempt(i: int) -> bool:
        lengths = (3000, 1300, 600, 60)
        requests = [
            Request(f"parked-{i}-{n}-x", random_prompt(4100 + 10 * i + n, tokens), 4, 0.2 * n)
            for n, tokens in enumerate(lengths)
        ]
        seen = asyncio.run(scenario(requests))
        require_right_answers(requests, reference)
        prefill.require_all_tokens_free()
        return seen

    repeat_until(attempt, "a prompt is parked")


def test_profile_is_taken_while_batches_pause(prefill: Prefill, reference: Reference) -> None:
    async def scenario() -> list[Request]:
        requests = mixed_requests(7, 12, "profile", 0.5)
        async with load.session() as http:
            running = asyncio.ensure_future(send_all_at_their_times(prefill, requests))
            body = {"output_dir": str(prefill.folder), "activities": ["CPU"], "num_steps": 4, "with_stack": False}
            async with http.post(prefill.server.url + "/start_profile", json=body) as reply:
                assert reply.status == 200, await reply.text()
            await running
        return requests

    require_right_answers(asyncio.run(scenario()), reference)
    assert list(prefill.folder.glob("*.trace.json.gz"))


@pytest.mark.parametrize("spare", [12, 24])
def test_lone_stream_leaves_memory_to_prompt_in_progress(prefill: Prefill, reference: Reference, spare: int) -> None:
    """SGLang aborts a lone stream that lacks memory. ``spare``: tokens that stream and prompt do not need at first."""
    stream = Request(f"lone-{spare}-x", random_prompt(8300 + spare, 900), 60, 0.0, sampling={"ignore_eos": False})
    prompt = Request(f"big-{spare}-x", random_prompt(8400 + spare, POOL - 900 - spare), 4, 0.1)
    asyncio.run(send_all_at_their_times(prefill, [stream, prompt]))
    require_right_answers([stream, prompt], reference)
    prefill.require_all_tokens_free()


def test_embeddings_are_refused_by_a_model_that_is_not_in_bfloat16(prefill: Prefill) -> None:
    """SGLang makes embeddings bfloat16; with weights of another type they would end the server."""
    body = {"input_embeds": [[0.1] * SHAPE.hidden] * 4, "sampling_params": {"max_new_tokens": 1}}
    status, answer = prefill.post("/generate", body)
    assert (status, "bfloat16" in answer) == (400, True), answer


def test_control_messages_that_would_end_the_server_are_refused(prefill: Prefill, reference: Reference) -> None:
    stream = Request("released-x", random_prompt(8500, 60), 120, 0.0)

    async def scenario() -> tuple[int, str]:
        async with load.session() as http:
            running = asyncio.ensure_future(stream.stream_answer(http, prefill.server.url))
            while not (stream.tokens or running.done()):
                await asyncio.sleep(0.005)
            async with http.post(prefill.server.url + "/release_memory_occupation", json={}) as reply:
                refused = reply.status, await reply.text()
            await running
        return refused

    status, answer = asyncio.run(scenario())
    assert (status, "not idle" in answer) == (400, True), answer
    for route, body, says in (
        ("/resume_memory_occupation", {"tags": ["weights"]}, "not released: weights"),
        ("/start_profile", {"profile_by_stage": True}, "num_steps"),
        ("/start_profile", {"output_dir": "/proc/none"}, "/proc/none"),
        ("/stop_profile", {}, "not in progress"),
    ):
        status, answer = prefill.post(route, body)
        assert (status, says in answer) == (400, True), (route, answer)
    for route in ("/release_memory_occupation", "/resume_memory_occupation"):
        status, answer = prefill.post(route)
        assert status == 200, answer
    require_right_answers([stream], reference)
    prefill.require_all_tokens_free()
