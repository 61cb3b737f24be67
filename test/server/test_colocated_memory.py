"""Servers that prefill and decode with memory kept beyond a request (HiCache prefixes on the host, sessions), or with
a limit of running requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import HICACHE as PLUGIN
from served import LAPS, Prefill, Reference, Setup, random_prompt, run_on
from ties import TIE

from benchmark.rig import devices

from .colocated import FREQUENT_PAUSES, LOOPS, Request, mixed_requests, require_right_answers, send_all_at_their_times
from .slicing import SHAPE
from .test_slices_features import HICACHE, PAGES

RUNNING = 6
ROWS = ("--max-running-requests", str(RUNNING))
SETUPS = tuple(
    Setup(
        f"colocated-memory-{name}",
        (*LAPS, *FREQUENT_PAUSES, *HICACHE, "--enable-streaming-session", *ROWS, *flags),
        devices.with_path({}, PLUGIN),
        SHAPE,
        mode="null",
    )
    for name, flags in LOOPS.items()
)
PRIORITIES = Setup(
    "colocated-rows-priorities",
    (*LAPS, *FREQUENT_PAUSES, *ROWS, "--enable-priority-scheduling", "--enable-streaming-session"),
    shape=SHAPE,
    mode="null",
)
WINDOWS = Setup(
    "colocated-memory-windows",
    (*LAPS, *FREQUENT_PAUSES, *HICACHE, *PAGES),
    devices.with_path({}, PLUGIN),
    "gptoss",
    mode="null",
)
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("clean")]


def steps_in_pauses(prefill: Prefill) -> int:
    status = prefill.get("/laps_status")
    assert status["enabled"], status["reason"]
    return int(status["decode"]["steps_in_pauses"])


async def wait_until_all_ended(prefill: Prefill, running: asyncio.Future[Any]) -> int:
    """Wait for ``running``; return the largest number of running requests that the server has reported meanwhile."""
    most = 0
    async with load.session() as http:
        while not running.done():
            async with http.get(prefill.server.url + "/v1/loads?include=core") as reply:
                most = max(most, *(x["num_running_reqs"] for x in (await reply.json())["loads"]))
            await asyncio.sleep(0.05)
    await running
    return most


@run_on(*SETUPS, WINDOWS)[0]
def test_host_prefixes_are_reused_while_streams_run(prefill: Prefill, reference: Reference) -> None:
    before = steps_in_pauses(prefill)

    def attempt(i: int) -> bool:
        seed, name = 2000 + 100 * i, f"host-{i}-{prefill.setup.name}"
        documents = [random_prompt(seed + i, 1400) for i in range(6)]
        kept = [Request(f"{name}-kept-{i}-x", d, 1, 0.2 * i) for i, d in enumerate(documents)]
        # More than the device holds, so that the documents stay on the host only.
        others = [Request(f"{name}-other-{i}-x", random_prompt(seed + 20 + i, 2400), 1, 0.2 * i) for i in range(3)]
        asyncio.run(send_all_at_their_times(prefill, kept))
        asyncio.run(send_all_at_their_times(prefill, others))
        requests = [Request(f"{name}-stream-{i}-x", random_prompt(seed + 30 + i, 60), 150, 0.0) for i in range(2)]
        for i, document in enumerate(documents):
            prompt = document + random_prompt(seed + 40 + i, 1200 if i % 2 else 30)
            requests.append(Request(f"{name}-again-{i}-x", prompt, 6, 0.3 + 0.3 * i))
        for a in requests[3::3]:
            a.leaves_after_s, a.aborts = 0.2, True
        asyncio.run(send_all_at_their_times(prefill, requests))
        require_right_answers([*kept, *others, *requests], reference)
        prefill.require_all_tokens_free()
        reused = [a.cached["host"] >= 1300 for a in requests if a.cached]
        return sum(reused) >= 2 and steps_in_pauses(prefill) > before

    repeat_until(attempt, "prefixes are reused from the host, and a step runs in a pause")


@run_on(*SETUPS)[0]
def test_prefix_is_read_after_its_load_although_loading_prompt_was_aborted(
    prefill: Prefill, reference: Reference
) -> None:
    before = prefill.get("/laps_status")["decode"]["abandoned_passes"]

    async def scenario(name: str, seed: int, leaves_after_s: float) -> list[Request]:
        document, url = random_prompt(seed, 1400), prefill.server.url
        # More than the device holds, so that the document stays on the host only.
        others = [Request(f"{name}-other-{i}-x", random_prompt(seed + i, 2400), 1, 0.0) for i in range(1, 4)]
        stream = Request(f"{name}-stream-x", random_prompt(seed + 4, 60), 200, 0.0)
        aborted = Request(
            f"{name}-aborted-x", document + random_prompt(seed + 5, 600), 4, 0.2, leaves_after_s, aborts=True
        )
        again = Request(f"{name}-again-x", document + random_prompt(seed + 6, 30), 4, 0.0)
        async with load.session() as http:
            for first in (Request(f"{name}-kept-x", document, 1, 0.0), *others):
                await first.stream_answer(http, url)
            beside = asyncio.ensure_future(stream.stream_answer(http, url))
            await aborted.send_at_its_time(http, url)
            await again.stream_answer(http, url)
            await beside
        return [stream, aborted, again]

    def attempt(i: int) -> bool:
        # From 0.03 s to 0.5 s: on a slow machine the pass begins later and lasts longer.
        found = asyncio.run(scenario(f"load-{i}-{prefill.setup.name}", 7000 + 100 * i, 0.03 * 1.5**i))
        require_right_answers(found, reference)
        prefill.require_all_tokens_free()
        return bool(prefill.get("/laps_status")["decode"]["abandoned_passes"] > before)

    repeat_until(attempt, "a pass ends while its prefix is loaded")


@run_on(*SETUPS)[0]
@pytest.mark.parametrize("streaming", [False, True])
def test_session_turns_continue_from_history(prefill: Prefill, reference: Reference, streaming: bool) -> None:
    before = steps_in_pauses(prefill)

    async def talk(http: Any, name: str, seed: int) -> list[Request]:
        """Run three turns of one session. Return each turn with its whole prompt, history included."""
        body = {"capacity_of_str_len": 100_000, "session_id": name, "streaming": streaming}
        async with http.post(prefill.server.url + "/open_session", json=body) as reply:
            assert reply.status == 200, await reply.text()
        rng, said, turns = random.Random(seed), list[int](), list[Request]()
        for n in range(3):
            new = random_prompt(seed + n, rng.choice((30, 400, 1100)) if n else 900)
            turn = Request(f"{name}-{n}-x", new, 20, 0.1 * rng.random())
            turn.session = {"id": name, "rid": turns[-1].rid if turns and not streaming else None}
            await turn.send_at_its_time(http, prefill.server.url)
            said += new
            turns.append(Request(turn.rid, list(said), turn.new, 0.0, tokens=turn.tokens, end=turn.end))
            said += turn.tokens
        async with http.post(prefill.server.url + "/close_session", json={"session_id": name}) as reply:
            assert reply.status == 200, await reply.text()
        return turns

    async def scenario(i: int) -> list[Request]:
        name = f"session-{streaming}-{i}-{prefill.setup.name}"
        others = mixed_requests(3000 + i, 10, f"{name}-beside", 2.0)
        async with load.session() as http:
            talks = [talk(http, f"{name}-{k}", 4000 + 100 * i + 10 * k) for k in range(3)]
            beside = asyncio.ensure_future(send_all_at_their_times(prefill, others))
            said = await asyncio.gather(*talks)
            await beside
        return [*others, *(turn for turns in said for turn in turns)]

    def attempt(i: int) -> bool:
        require_right_answers(asyncio.run(scenario(i)), reference)
        prefill.require_all_tokens_free()
        return steps_in_pauses(prefill) > before

    repeat_until(attempt, "a step runs in a pause")


@contextmanager
def open_streaming_session(prefill: Prefill, name: str) -> Iterator[Callable[..., tuple[int, str]]]:
    """Provide a function that sends a turn of a streaming session and returns status and answer."""
    about = {"capacity_of_str_len": 100_000, "session_id": name, "streaming": True}
    assert prefill.post("/open_session", about)[0] == 200

    def send(prompt: list[Any], **more: Any) -> tuple[int, str]:
        sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "session_params": {"id": name}}
        return prefill.post("/generate", {**body, **more})

    yield send
    assert prefill.post("/close_session", {"session_id": name})[0] == 200
    prefill.require_all_tokens_free()


@run_on(*SETUPS)[0]
def test_log_probabilities_of_a_turn_start_after_its_history(prefill: Prefill, reference: Reference) -> None:
    """SGLang ignores where a streaming session asks for them to start; a lookup from there ended the server."""
    said: list[int] = []
    with open_streaming_session(prefill, f"start-{prefill.setup.name}") as send:
        for n in range(2):
            said += random_prompt(5000 + n, 300)
            status, text = send(said[-300:], return_logprob=True, logprob_start_len=0)
            assert status == 200, text
            answer = json.loads(text)
            assert reference.shortfall(said, answer["output_ids"]) <= TIE
            assert len(answer["meta_info"]["output_token_logprobs"]) == 5
            said += answer["output_ids"]


@run_on(*SETUPS)[0]
def test_turns_that_a_streaming_session_refuses_leave_it_as_it_was(prefill: Prefill, reference: Reference) -> None:
    """SGLang gave the first row of a session to two turns at once, and took in a turn beside another after a refusal;
    either can end the server."""
    first, second = random_prompt(5100, 50), random_prompt(5101, 60)
    with open_streaming_session(prefill, f"refused-batch-{prefill.setup.name}") as send:
        status, text = send([first, second, first])
        assert (status, "already has an active request" in text) == (400, True), text
    with open_streaming_session(prefill, f"refused-{prefill.setup.name}") as send, ThreadPoolExecutor(1) as threads:
        said = [*first, *json.loads(send(first)[1])["output_ids"], *second]
        sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
        running = threads.submit(send, second, sampling_params=sampling)
        refused = 0
        while not prefill.get("/v1/loads?include=core")["loads"][0]["num_running_reqs"] and not running.done():
            pass
        while not running.done():
            status, text = send(first)
            refused += status == 400
        assert refused >= 2, "the turn has ended too soon"
        tokens = json.loads(running.result()[1])["output_ids"]
        assert len(tokens) == 400
        assert reference.shortfall(said, tokens) <= TIE


@run_on(*SETUPS)[0]
def test_running_requests_stay_within_limit(prefill: Prefill, reference: Reference) -> None:
    """The limit counts short batches in a pause together with paused and decoded requests."""

    def attempt(i: int) -> bool:
        requests = mixed_requests(6 + 100 * i, 30, f"limit-{i}-{prefill.setup.name}", 1.0)

        async def scenario() -> int:
            sending = asyncio.ensure_future(send_all_at_their_times(prefill, requests))
            return await wait_until_all_ended(prefill, sending)

        most = asyncio.run(scenario())
        require_right_answers(requests, reference)
        prefill.require_all_tokens_free()
        assert most <= RUNNING
        return most >= RUNNING - 2

    repeat_until(attempt, "the limit is seen")


@run_on(*SETUPS, PRIORITIES)[0]
def test_long_prompts_get_rows_while_short_requests_wait(prefill: Prefill, reference: Reference) -> None:
    ended: list[Request] = []

    async def one(http: Any, a: Request) -> None:
        await a.send_at_its_time(http, prefill.server.url)
        ended.append(a)

    async def scenario(requests: list[Request]) -> None:
        async with load.session() as http:
            await asyncio.gather(*(one(http, a) for a in requests))

    def attempt(i: int) -> bool:
        name, seed = f"rows-{i}-{prefill.setup.name}", 9000 + 1000 * i
        shorts = [Request(f"{name}-short-{n}-x", random_prompt(seed + n, 30), 24, 0.0) for n in range(120)]
        longs = [Request(f"{name}-long-{n}-x", random_prompt(seed + 500 + n, 1500), 2, 0.1 * n) for n in range(3)]
        ended.clear()
        asyncio.run(scenario([*shorts, *longs]))
        require_right_answers(ended, reference)
        prefill.require_all_tokens_free()
        return max(map(ended.index, longs)) < len(ended) * 3 // 4

    repeat_until(attempt, "the last long prompt ends before a fourth of the short requests", lambda: len(ended), 3)


@run_on(PRIORITIES)[0]
def test_beams_of_paused_prompts_find_rows(prefill: Prefill, reference: Reference) -> None:
    """A row for each beam is taken when the prompt is prefilled. Meanwhile short requests take rows in its pauses."""

    async def ask(http: Any, prompt: list[int], at_s: float) -> list[int]:
        await asyncio.sleep(at_s)
        sampling = {"beam_width": RUNNING - 2, "max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        async with http.post(prefill.server.url + "/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return list((await reply.json())["output_ids"])

    async def scenario(i: int, requests: list[Request]) -> None:
        async with load.session() as http:
            beside = asyncio.ensure_future(send_all_at_their_times(prefill, requests))
            prompts = [random_prompt(9500 + 10 * i + n, 950 + 500 * (n % 2)) for n in range(3)]
            answers = await asyncio.gather(*(ask(http, prompt, 0.3 * n) for n, prompt in enumerate(prompts)))
            assert [len(a) for a in answers] == [4] * len(prompts)
            await beside

    before = prefill.get("/laps_status")["preemption"]["by_short_batches"]

    def attempt(i: int) -> bool:
        requests = [Request(f"beams-{i}-{n}-x", random_prompt(9600 + 100 * i + n, 30), 20, 0.05 * n) for n in range(30)]
        asyncio.run(scenario(i, requests))
        require_right_answers(requests, reference)
        prefill.require_all_tokens_free()
        return bool(prefill.get("/laps_status")["preemption"]["by_short_batches"] > before)

    repeat_until(attempt, "short requests run in a pause")


@run_on(PRIORITIES)[0]
def test_turns_of_sessions_are_not_preempted(prefill: Prefill, reference: Reference) -> None:
    """A turn of a streaming session leaves its row to the session; SGLang gives the row away and ends the server."""

    async def scenario(turns: list[Request], others: list[Request]) -> None:
        async with load.session() as http:
            for a in turns:
                body = {"capacity_of_str_len": 100_000, "session_id": a.rid, "streaming": True}
                async with http.post(prefill.server.url + "/open_session", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                a.session = {"id": a.rid, "rid": None}
            await send_all_at_their_times(prefill, [*turns, *others])
            for a in turns:
                async with http.post(prefill.server.url + "/close_session", json={"session_id": a.rid}) as reply:
                    assert reply.status == 200, await reply.text()

    turns = [Request(f"turn-{i}-x", random_prompt(9900 + i, 60), 120, 0.0) for i in range(RUNNING // 2)]
    others = [Request(f"above-{i}-x", random_prompt(9950 + i, 30), 4, 0.5, priority=100) for i in range(RUNNING)]
    asyncio.run(scenario(turns, others))
    require_right_answers([*turns, *others], reference)
    prefill.require_all_tokens_free()
