"""Long batches in slices on real servers: preemptions, actions that must wait, and right tokens throughout."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import NORMAL_LOOP, Prefill, Reference, random_prompt, run_on

from .slicing import arrived_during, count_preemptions, post, request_body, slicing_setup, wait_until_slices_run

LARGE = slicing_setup("slices-normal-8192", *NORMAL_LOOP, "--chunked-prefill-size", "8192")
pytestmark = run_on(LARGE, slicing_setup("slices-overlap-512"))


def long_prompt(prefill: Prefill, seed: int) -> list[int]:
    """Return a prompt that takes a second or more: on a CPU each chunk attends to the whole prompt before it."""
    return random_prompt(seed, 9000 if prefill.setup is LARGE else 4500)


def test_random_preemption_keeps_tokens_correct(prefill: Prefill, reference: Reference) -> None:
    before = count_preemptions(prefill)

    def attempt(i: int) -> bool:
        rng, seed = random.Random(3), 10_000 * i
        document = random_prompt(seed + 77, 1500)
        prompts = [random_prompt(seed + 100 + i, rng.choice((600, 1100, 2500, 4200))) for i in range(8)]
        prompts += [random_prompt(seed + 300 + i, rng.randint(5, 250)) for i in range(60)]
        prompts += [document + random_prompt(seed + 500 + i, rng.randint(5, 900)) for i in range(6)]

        async def scenario() -> list[int]:
            async with load.session() as http:
                assert (await post(http, prefill, request_body(document)))[0] == 200
                sent = [post(http, prefill, request_body(p), rng.random() * 4.0) for p in prompts]
                answers = await asyncio.gather(*sent)
            assert all(status == 200 for status, _, _ in answers), answers
            assert sum(answer["meta_info"]["cached_tokens"] >= len(document) for _, answer, _ in answers) >= 2
            return [int(answer["output_ids"][0]) for _, answer, _ in answers]

        got = asyncio.run(scenario())
        for i in [*range(8), *range(8, 68, 6), *range(68, 74)]:
            assert got[i] == reference.greedy(prompts[i], 1)[0], f"prompt {i} of {len(prompts[i])} tokens"
        return count_preemptions(prefill) > before

    repeat_until(attempt, "a batch preempts")
    slices = prefill.get("/laps_status")["slices"]
    assert 0.0 <= slices.pop("pause_ms") < 100.0
    assert slices == {"on": True, "why_not": None, "operators": 4, "launch_ms": 0.0}


def test_short_requests_share_steps_with_nearly_short_prompts(prefill: Prefill, reference: Reference) -> None:
    """With a chunk so large that all of them ran in one long step, a batch of its own would be earlier for each."""
    rng, before = random.Random(5), prefill.get("/laps_status")["preemption"]["steps_shared"]
    large = prefill.setup is LARGE
    for burst in range(8):
        prompts = [
            random_prompt(1000 * burst + i, rng.randint(257, 300) if i % 3 else rng.randint(5, 60)) for i in range(90)
        ]

        async def scenario(prompts: list[list[int]]) -> list[int]:
            async with load.session() as http:
                answers = await asyncio.gather(
                    *(post(http, prefill, request_body(p), rng.random() * 0.2) for p in prompts)
                )
            assert all(status == 200 for status, _, _ in answers), answers
            return [int(answer["output_ids"][0]) for _, answer, _ in answers]

        got = asyncio.run(scenario(prompts))
        for i in range(0, 90, 7):
            assert got[i] == reference.greedy(prompts[i], 1)[0], f"prompt {i} of {len(prompts[i])} tokens"
        if large or prefill.get("/laps_status")["preemption"]["steps_shared"] > before:
            return
    raise AssertionError("no step was shared")


def test_short_request_is_answered_before_running_long_batch(prefill: Prefill) -> None:
    async def scenario(i: int) -> bool:
        async with load.session() as http:
            long = asyncio.ensure_future(post(http, prefill, request_body(long_prompt(prefill, 1000 + i))))
            await wait_until_slices_run(http, prefill, long)
            status, answer, at = await post(http, prefill, request_body(random_prompt(1100 + i, 40)))
            assert status == 200, answer
            return arrived_during(answer, (await long)[1]) and (await long)[2] > at

    repeat_until(lambda i: asyncio.run(scenario(i)), "a short request is answered before a long one that runs")


def test_flush_and_pause_leave_running_batch_correct(prefill: Prefill, reference: Reference) -> None:
    """Checks a flush, a pause and the requests after them."""
    prompt = long_prompt(prefill, 2)

    async def scenario() -> None:
        async with load.session() as http:
            long = asyncio.ensure_future(post(http, prefill, request_body(prompt)))
            await wait_until_slices_run(http, prefill, long)
            async with http.post(prefill.server.url + "/flush_cache") as reply:
                assert reply.status in (200, 400)  # 200: the batch had ended by then
            async with http.post(prefill.server.url + "/pause_generation", json={"mode": "in_place"}) as reply:
                assert reply.status == 200
            behind = asyncio.ensure_future(post(http, prefill, request_body(random_prompt(3, 30))))
            await asyncio.sleep(0.3)
            assert not behind.done()
            async with http.post(prefill.server.url + "/continue_generation", json={}) as reply:
                assert reply.status == 200
            status, answer, _ = await long
            assert (status, answer["output_ids"]) == (200, reference.greedy(prompt, 1))
            assert (await behind)[0] == 200

    asyncio.run(scenario())


def test_control_requests_are_answered_while_long_batch_runs(prefill: Prefill) -> None:
    """Opens and closes a session, profiles and configures the server, which then still accepts new requests."""
    seen: set[str] = set()

    async def scenario(i: int) -> bool:
        """Return True if all requests were sent after a long prompt had begun and answered before its end."""
        done: dict[str, tuple[float, float]] = {}
        async with load.session() as http:

            async def ask_for(route: str, **body: Any) -> Any:
                begin = time.time()
                async with http.post(prefill.server.url + route, json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    done[route] = begin, time.time()
                    return await reply.text()

            long = asyncio.ensure_future(post(http, prefill, request_body(long_prompt(prefill, 2100 + i))))
            await wait_until_slices_run(http, prefill, long)
            session = json.loads(await ask_for("/open_session", capacity_of_str_len=1000))
            await ask_for("/start_profile", output_dir=str(prefill.folder), activities=["CPU"], start_step=1 << 40)
            await ask_for("/configure_logging", log_requests=False)
            await ask_for("/freeze_gc")
            await ask_for("/close_session", session_id=session)
            status, answer, at = await post(http, prefill, request_body(random_prompt(2200 + i, 40)))
            assert status == 200, answer
            done["a short request"] = answer["meta_info"]["request_received_ts"], at
            _, answer, end = await long
        begun = answer["meta_info"]["forward_entry_time"]
        seen.update(what for what, (asked, at) in done.items() if begun <= asked and at < end)
        return seen == done.keys()

    repeat_until(lambda i: asyncio.run(scenario(i)), "each is answered while a long batch runs", lambda: seen)


def test_profile_that_starts_in_a_pass_ends_after_its_steps(prefill: Prefill) -> None:
    steps = 3
    profile = {"output_dir": str(prefill.folder / "profile"), "activities": ["CPU"], "with_stack": False}

    async def scenario() -> None:
        async with load.session() as http:
            long = asyncio.ensure_future(post(http, prefill, request_body(long_prompt(prefill, 2300))))
            await wait_until_slices_run(http, prefill, long)
            async with http.post(prefill.server.url + "/start_profile", json={**profile, "num_steps": steps}) as reply:
                assert reply.status == 200, await reply.text()
            for i in range(2 * steps):
                assert (await post(http, prefill, request_body(random_prompt(2310 + i, 40))))[0] == 200
            assert (await long)[0] == 200

    asyncio.run(scenario())
    (trace,) = (prefill.folder / "profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(str(event.get("name")).startswith("step[") for event in events) == steps


def test_input_logprobs_are_equal_with_and_without_concurrent_prompts(prefill: Prefill) -> None:
    prompt = random_prompt(4, 2500)
    body = {**request_body(prompt), "return_logprob": True, "logprob_start_len": len(prompt) - 50}

    async def scenario(crowd: int) -> list[float]:
        async with load.session() as http:
            others = [post(http, prefill, request_body(random_prompt(40 + i, 60)), 0.02 * i) for i in range(crowd)]
            (_, answer, _), *_ = await asyncio.gather(post(http, prefill, body), *others)
            return [round(x[0], 3) for x in answer["meta_info"]["input_token_logprobs"][1:]]

    alone = asyncio.run(scenario(0))

    def attempt(_: int) -> bool:
        prefill.require_all_tokens_free()
        before = count_preemptions(prefill)
        assert asyncio.run(scenario(20)) == pytest.approx(alone, abs=2e-3)
        return count_preemptions(prefill) > before

    repeat_until(attempt, "a batch preempts")


@pytest.mark.timeout(600)
def test_aborts_at_random_times_free_all_tokens_and_queues(prefill: Prefill) -> None:
    """300 mixed requests, a third aborted: waiting, parked, paused between slices, and preempting."""
    rng = random.Random(9)

    async def one(http: Any, i: int) -> str:
        await asyncio.sleep(rng.random() * 6.0)
        prompt = random_prompt(1000 + i, rng.randint(600, 4000) if i % 12 == 0 else rng.randint(5, 120))
        sent = asyncio.ensure_future(post(http, prefill, request_body(prompt, f"slices-{i}-x")))
        if i % 3 == 0:
            await asyncio.sleep(rng.choice((0.0, 0.02, 0.1, 0.5, 1.5)) * rng.random())
            async with http.post(prefill.server.url + "/abort_request", json={"rid": f"slices-{i}-x"}) as reply:
                assert reply.status == 200
        status, answer, _ = await sent
        reason = answer["meta_info"]["finish_reason"]["type"] if status == 200 else "abort"
        assert reason == "length" or i % 3 == 0, answer
        return str(reason)

    async def storm() -> list[str]:
        async with load.session() as http:
            return list(await asyncio.gather(*(one(http, i) for i in range(300))))

    ends = asyncio.run(storm())
    assert ends.count("length") >= 300 * 2 // 3
    assert ends.count("abort") > 0
    prefill.require_all_tokens_free()
    status = prefill.get("/laps_status")
    assert (status["parked"], status["in_progress"]) == (None, 0)
    assert [q["depth"] for q in status["queues"].values()] == [0, 0]
