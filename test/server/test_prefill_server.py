"""One prefill server with LAPS on, in both of SGLang's loops: real requests, real aborts, nothing left over."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import http_load as load
import pytest
from served import CHUNK, NORMAL, OVERLAP, Prefill, Reference, random_prompt, request_body, run_on, send_all

pytestmark = run_on(NORMAL, OVERLAP)


def test_lone_long_prompt_completes_in_chunks(prefill: Prefill, reference: Reference) -> None:
    prompt = random_prompt(1, 5 * CHUNK + 17)
    before = prefill.totals()
    assert asyncio.run(send_all(prefill, [prompt])) == reference.greedy(prompt, 1)
    after = prefill.totals()
    assert after["long"]["batches"] - before["long"]["batches"] == 6
    assert after["long"]["tokens"] - before["long"]["tokens"] == len(prompt)


def test_mixed_load_keeps_classes_apart_and_tokens_correct(prefill: Prefill, reference: Reference) -> None:
    rng = random.Random(2)
    prompts = [random_prompt(100 + i, 3 * CHUNK + i if i % 10 == 0 else rng.randint(5, 256)) for i in range(80)]
    before = prefill.totals()
    got = asyncio.run(send_all(prefill, prompts, spread_s=1.0))
    after = prefill.totals()
    for i in [*range(0, 80, 10), *range(1, 80, 7)]:
        assert got[i] == reference.greedy(prompts[i], 1)[0], f"prompt {i} of {len(prompts[i])} tokens"
    for cls, member in (("short", lambda p: len(p) <= 256), ("long", lambda p: len(p) > 256)):
        # A batch of both classes would have moved tokens from one count to the other.
        tokens = after[cls]["tokens"] - before[cls]["tokens"]
        assert tokens == sum(len(p) for p in prompts if member(p))
    shorts = sum(1 for p in prompts if len(p) <= 256)
    assert after["short"]["requests"] - before["short"]["requests"] == shorts


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_complete_after_pause_and_continue(prefill: Prefill, mode: str) -> None:
    async def scenario() -> None:
        sending = asyncio.ensure_future(
            send_all(
                prefill, [random_prompt(50, 6 * CHUNK), *(random_prompt(60 + i, 50) for i in range(10))], spread_s=0.4
            )
        )
        await asyncio.sleep(0.25)
        assert prefill.post("/pause_generation", {"mode": mode})[0] == 200
        await asyncio.sleep(0.3)
        assert prefill.post("/continue_generation", {})[0] == 200
        assert len(await sending) == 11

    asyncio.run(scenario())


def test_abort_of_request_that_has_not_reached_the_scheduler(prefill: Prefill) -> None:
    async def ask(http: Any, room: int) -> tuple[int, Any]:
        body = request_body(room, random_prompt(70, 5 * CHUNK), rid="early")
        async with http.post(prefill.server.url + "/generate", json=body) as reply:
            return reply.status, await reply.json()

    async def scenario() -> None:
        async with load.session() as http:
            # In this mode new requests wait before they are sent to the scheduler.
            assert prefill.post("/pause_generation", {"mode": "abort"})[0] == 200
            both = [asyncio.ensure_future(ask(http, room)) for room in (71, 72)]
            # The second request of an id is refused at once: the first one has arrived.
            done, (first,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            assert [one.result()[0] for one in done] == [400]
            assert prefill.post("/abort_request", {"rid": "early"})[0] == 200
            assert prefill.post("/continue_generation", {})[0] == 200
            status, answer = await first
            assert status != 200 or answer["meta_info"]["finish_reason"]["type"] == "abort", answer

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["start", "stop", "dump"])
def test_records_of_experts_are_refused_without_a_recorder(prefill: Prefill, what: str) -> None:
    status, answer = prefill.post(f"/{what}_expert_distribution_record")
    assert (status, "--expert-distribution-recorder-mode" in answer) == (400, True), answer


def test_health_checks_pass_under_load(prefill: Prefill) -> None:
    async def scenario() -> None:
        sending = asyncio.ensure_future(
            send_all(prefill, [random_prompt(70 + i, 3 * CHUNK if i < 3 else 40) for i in range(30)], 0.5)
        )
        async with load.session() as http:
            for _ in range(3):
                await asyncio.sleep(0.2)
                async with http.get(prefill.server.url + "/health_generate") as reply:
                    assert reply.status == 200
        await sending

    asyncio.run(scenario())


@pytest.mark.timeout(600)
def test_abort_storm_frees_all_tokens_and_queues(prefill: Prefill) -> None:
    """600 mixed requests, a third aborted at random ages: waiting, parked and in flight."""
    count = 600
    rng = random.Random(9)

    async def one(http: Any, i: int) -> str:
        await asyncio.sleep(rng.random() * count / 100)
        prompt = random_prompt(1000 + i, rng.randint(600, 1600) if i % 12 == 0 else rng.randint(5, 120))
        rid = f"storm-{i}-x"
        post = asyncio.ensure_future(
            http.post(prefill.server.url + "/generate", json=request_body(rng.getrandbits(60), prompt, rid))
        )
        if i % 3 == 0:
            await asyncio.sleep(rng.choice((0.0, 0.005, 0.05, 0.3)) * rng.random())
            async with http.post(prefill.server.url + "/abort_request", json={"rid": rid}) as reply:
                assert reply.status == 200
        async with await post as reply:
            answer = await reply.json()
        reason = answer["meta_info"]["finish_reason"]["type"] if reply.status == 200 else "abort"
        assert reason == "length" or i % 3 == 0, answer
        return str(reason)

    async def storm() -> list[str]:
        async with load.session() as http:
            return list(await asyncio.gather(*(one(http, i) for i in range(count))))

    ends = asyncio.run(storm())
    assert ends.count("length") >= count * 2 // 3
    assert ends.count("abort") > 0
    prefill.require_all_tokens_free()
    status = prefill.get("/laps_status")
    assert (status["parked"], status["in_progress"]) == (None, 0)
    assert [q["depth"] for q in status["queues"].values()] == [0, 0]


def test_disconnects_free_all_tokens(prefill: Prefill) -> None:
    async def scenario() -> None:
        async with load.session() as http:

            async def leave(i: int) -> None:
                post = http.post(
                    prefill.server.url + "/generate",
                    json=request_body(i + 7, random_prompt(i, 4 * CHUNK if i % 5 == 0 else 60)),
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(post, 0.01 + 0.02 * (i % 4))

            await asyncio.gather(*(leave(i) for i in range(40)))

    asyncio.run(scenario())
    prefill.require_all_tokens_free()


def test_status_route_server_info_and_metrics_report_laps(prefill: Prefill) -> None:
    status = prefill.get("/laps_status")
    assert status["enabled"] is True
    assert status["threshold"]["tokens"] == 256
    assert set(status["queues"]) == set(status["totals"]) == {"short", "long"}
    assert 0.0 <= status["slices"].pop("pause_ms") < 100.0
    assert status["slices"] == {"on": True, "why_not": None, "operators": 4, "launch_ms": 0.0}
    assert set(status["preemption"]) == {"gap_ms", "by_short_batches", "by_smaller_prompts", "steps_shared"}
    assert set(status["fairness"]) == {"guard", "credit_s"}
    # The backlog is also reported in seconds once the latency model is fitted.
    assert set(status["load"]) - {"backlog_s"} == {"backlog_tokens", "slo_deviation", "busy_share", "busy_s"}
    assert set(status["load"]["busy_s"]) == {"short", "long"}
    assert status["longest"] > 0
    assert set(status["pool"]) == {"assignment", "version"}
    assert prefill.get("/server_info")["internal_states"][0]["laps"]["totals"] == status["totals"]
    series = prefill.get("/metrics")
    for name in ("queue_depth", "queue_tokens", "parked", "batches_total", "busy_s_total", "length_threshold_tokens"):
        assert f"sglang:laps_{name}" in series
