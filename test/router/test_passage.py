"""Requests through the router to fake servers, over real sockets."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from laps_core.pools.pressure import POOLS, Pool

from .fakes import JSON_TYPE, LONG, SHORT, FakeDecode, FakePrefill, Stack, events_of, stack


def test_each_class_streams_through_matching_pool() -> None:
    async def run() -> None:
        async with stack(2) as s:
            classes: tuple[tuple[str, Pool], ...] = ((SHORT, "short"), (LONG, "long"))
            for text, pool in classes:
                async with s.client.post(f"{s.url}/generate", json={"text": text, "stream": True}) as r:
                    assert r.status == 200
                    assert r.headers["content-type"].startswith("text/event-stream")
                    events = await events_of(r)
                assert events[-1] == "[DONE]"
                assert [json.loads(e)["text"] for e in events[:-1]] == ["t0", "t1", "t2"]
                assert s.pool(pool)[0].bodies[-1]["text"] == text
            await s.at_rest()
            counts = (await s.status())["counts"]
            assert counts["requests"] == {"short": 1, "long": 1}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("generate", {"text": SHORT}),
        ("generate", {"text": [SHORT, SHORT]}),
        ("generate", {"input_ids": [1] * 40}),
        ("generate", {"input_ids": [[1] * 40, [2] * 9]}),
        ("v1/completions", {"prompt": SHORT}),
        ("v1/completions", {"prompt": [1, 2, 3]}),
        ("v1/completions", {"prompt": [SHORT, SHORT]}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": SHORT}]}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": SHORT}]}]}),
    ],
)
def test_each_route_forwards_body_to_both_servers(route: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with stack(2) as s:
            status, _ = await s.post(route, **body)
            assert status == 200
            (prefill,) = [p for p in s.prefills if p.bodies]
            assert prefill in s.pool("short")
            seen, also = prefill.bodies[0], s.decodes[0].bodies[0]
            names = [r if isinstance(r, list) else [r] for r in (seen["rid"], also["rid"])]
            assert names[0] == [f"{r}.prefill" for r in names[1]]
            assert seen == {**also, "rid": seen["rid"]}
            assert {k: seen[k] for k in body} == body
            prompts = next(iter(body.values()))
            batch = isinstance(prompts, list) and isinstance(prompts[0], (list, str))
            assert seen["bootstrap_port"] == ([8998, 8998] if batch else 8998)
            assert seen["bootstrap_host"] == (["127.0.0.1"] * 2 if batch else "127.0.0.1")
            await s.at_rest()

    asyncio.run(run())


def test_batch_is_classified_by_total_length() -> None:
    async def run() -> None:
        async with stack(2) as s:
            await s.post(text=["c" * 400] * 2)
            await s.post(text=["d" * 400] * 20)
            sent = [[len(body["text"]) for body in s.pool(pool)[0].bodies] for pool in POOLS]
            assert sent == [[2], [20]]

    asyncio.run(run())


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"nonsense", b'{"text": "a"', b"\xff"])
def test_malformed_body_is_refused_without_reaching_prefill_servers(raw: bytes) -> None:
    async def run() -> None:
        async with stack(2) as s:
            async with s.client.post(f"{s.url}/generate", data=raw, headers=JSON_TYPE) as r:
                assert r.status in (400, 422)
                assert (await r.json())["error"]["type"] == "invalid_request_error"
            await s.at_rest()
            assert (await s.status())["counts"]["refused"] == 1
            assert not any(p.bodies for p in s.prefills)

    asyncio.run(run())


def test_stock_routes_prefer_healthy_servers() -> None:
    async def run() -> None:
        async with stack(2, 2) as s:
            prefills, decodes = s.lb.pools.instances, s.lb.decoders
            prefills[0].healthy = decodes[1].healthy = False
            assert (s.balancer.prefill_urls, s.balancer.decode_urls) == ([prefills[1].url], [decodes[0].url])
            prefills[1].healthy = False
            assert s.balancer.prefill_urls == [p.url for p in prefills]

    asyncio.run(run())


def test_stock_health_route_returns_200() -> None:
    async def run() -> None:
        async with stack(2) as s, s.client.get(f"{s.url}/health") as r:
            assert r.status == 200

    asyncio.run(run())


def test_body_with_nan_and_big_integer_is_forwarded() -> None:
    async def run() -> None:
        async with stack(2) as s:
            raw = b'{"text": "a", "x": NaN, "big": 123456789012345678901234567890}'
            async with s.client.post(f"{s.url}/generate", data=raw, headers=JSON_TYPE) as r:
                assert r.status == 200
            for server in (s.pool("short")[0], s.decodes[0]):
                assert math.isnan(server.bodies[0]["x"])
                assert server.bodies[0]["big"] == 123456789012345678901234567890

    asyncio.run(run())


def test_router_replaces_bootstrap_room_and_derives_prefill_rid() -> None:
    async def run() -> None:
        async with stack(2) as s:
            await s.post(text=SHORT, bootstrap_room=7, rid="mine")
            assert s.decodes[0].bodies[0]["bootstrap_room"] != 7
            rid = s.decodes[0].bodies[0]["rid"]
            # A decode server that takes KV back asks the prefill server again, under its own id.
            assert [b["rid"] for p in s.prefills for b in p.bodies] == [f"{rid}.prefill"]

    asyncio.run(run())


def test_deadline_header_becomes_custom_parameter() -> None:
    async def run() -> None:
        async with stack(2) as s:
            for route, body in (
                ("generate", {"text": SHORT, "sampling_params": {"max_new_tokens": 3}}),
                ("generate", {"text": SHORT}),
                ("v1/completions", {"prompt": SHORT}),
                ("v1/chat/completions", {"messages": [{"role": "user", "content": SHORT}]}),
            ):
                async with s.client.post(f"{s.url}/{route}", json=body, headers={"x-sgl-ttft-slo-ms": "250"}) as r:
                    assert r.status == 200
                for server in (s.pool("short")[0], s.decodes[0]):
                    seen = server.bodies[-1]
                    custom = seen["sampling_params"]["custom_params"] if route == "generate" else seen["custom_params"]
                    assert custom == {"ttft_slo_ms": 250.0}
            assert s.decodes[0].bodies[0]["sampling_params"]["max_new_tokens"] == 3

    asyncio.run(run())


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "soon"])
def test_invalid_deadline_returns_400_naming_header(value: str) -> None:
    async def run() -> None:
        async with stack(2) as s:
            async with s.client.post(
                f"{s.url}/generate", json={"text": SHORT}, headers={"x-sgl-ttft-slo-ms": value}
            ) as r:
                assert r.status == 400
                assert "x-sgl-ttft-slo-ms" in (await r.json())["error"]["message"]
            await s.at_rest()

    asyncio.run(run())


def test_api_key_and_request_id_reach_both_servers() -> None:
    async def run() -> None:
        async with stack(2) as s:
            headers = {"Authorization": "Bearer k", "x-request-id": "r1"}
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers=headers) as r:
                assert r.status == 200
            for server in (s.pool("short")[0], s.decodes[0]):
                assert server.headers[0]["authorization"] == "Bearer k"
                assert server.headers[0]["x-request-id"] == "r1"
                assert server.headers[0]["host"].endswith(str(server.port))

    asyncio.run(run())


def test_reply_merges_logprobs_of_both_servers() -> None:
    async def run() -> None:
        async with stack(2) as s:
            both = [[-1.0, 5], [-2.0, 6]]
            _, reply = await s.post(text=SHORT, return_logprob=True)
            assert reply["meta_info"]["input_token_logprobs"] == both
            _, replies = await s.post(text=[SHORT, SHORT], return_logprob=True)
            assert [reply["meta_info"]["input_token_logprobs"] for reply in replies] == [both, both]
            body = {"text": SHORT, "return_logprob": True, "stream": True}
            async with s.client.post(f"{s.url}/generate", json=body) as r:
                events = await events_of(r)
            assert [json.loads(e)["meta_info"]["input_token_logprobs"] for e in events[:-1]] == [both] * 3
            assert events[-1] == "[DONE]"

    asyncio.run(run())


def test_request_timeout_returns_504() -> None:
    async def run() -> None:
        async with stack(2, args={"request_timeout_secs": 0.3}) as s:
            s.pool("short")[0].gate.clear()
            status, reply = await s.post(text=SHORT)
            assert status == 504
            assert reply["error"]["type"] == "timeout"
            await s.at_rest()
            s.pool("short")[0].gate.set()

    asyncio.run(run())


async def disconnect_midway(s: Stack, i: int, patience_s: float | None) -> None:
    """Send a request and disconnect: before any answer, or in the middle of a stream."""
    text = SHORT if i % 2 else f"{i}{LONG}"
    body = {"text": text, "stream": i % 3 > 0}
    try:
        async with asyncio.timeout(patience_s):
            async with s.client.post(f"{s.url}/generate", json=body) as r:
                await r.content.readany()
                if i % 5:
                    await r.read()
    except TimeoutError:
        pass


def test_500_disconnects_leave_no_outstanding_requests() -> None:
    async def run() -> None:
        async with stack(
            4,
            2,
            make_prefill=lambda w: FakePrefill(w, tokens_per_s=200_000),
            make_decode=lambda w: FakeDecode(w, chunks=5, pause_s=0.05),
        ) as s:
            took_s = math.inf  # a client's patience is drawn relative to this
            for start in (1000, 1100, 1200):
                begin = time.perf_counter()
                await asyncio.gather(*(disconnect_midway(s, start + i, None) for i in range(100)))
                took_s = min(took_s, time.perf_counter() - begin)
            before = (await s.status())["counts"]["requests"]
            for start in range(100, 600, 100):
                crowd = range(start, start + 100)
                await asyncio.gather(*(disconnect_midway(s, i, took_s * (0.05 + 0.01 * (i % 50))) for i in crowd))
            # The router reads this request after all bytes that the disconnected clients had sent.
            assert (await s.post(text=SHORT))[0] == 200
            async with asyncio.timeout(120):
                while (found := await s.status())["in_flight"]:
                    await s.at_rest()
            for i in (*found["prefill"], *found["decode"]):
                assert (i["outstanding_requests"], i["outstanding_tokens"]) == (0, 0)
            assert found["counts"]["disconnected"] > 100
            await s.until(lambda: all(f.running == 0 for f in (*s.prefills, *s.decodes)))
            assert sum(len(f.aborted) for f in (*s.prefills, *s.decodes)) > 100
            assert all(found["counts"]["requests"][p] - before[p] > 50 for p in POOLS)

    asyncio.run(run())


def test_prefill_load_ends_at_first_token_before_decode_load() -> None:
    async def run() -> None:
        async with stack(2, make_decode=lambda w: FakeDecode(w, chunks=3, pause_s=0.1)) as s:
            s.pool("short")[0].gate.clear()
            asking = asyncio.create_task(s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}))
            await s.until(lambda: any(i.outstanding_tokens > 0 for i in s.lb.pools.instances))
            s.pool("short")[0].gate.set()
            async with await asking as r:
                assert s.lb.decoders[0].outstanding == 1
                await r.content.readany()
                assert all(i.outstanding_tokens == 0 for i in s.lb.pools.instances)
                assert s.lb.decoders[0].outstanding == 1
                await r.read()
            await s.at_rest()

    asyncio.run(run())


def test_decode_server_connections_are_reused() -> None:
    async def run() -> None:
        async with stack(2) as s:
            for _ in range(20):
                assert (await s.post(text=SHORT))[0] == 200
            assert len(s.decodes[0].bodies) == 20
            # Not 20. Probes and load reports use connections at the same time, and idle ones close after a while.
            assert len(s.decodes[0].peers) <= 5

    asyncio.run(run())


def test_chunked_request_body_is_read_completely() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"text": "'
        await asyncio.sleep(0.02)
        yield b"a" * 100_000 + b'"}'

    async def run() -> None:
        async with stack(2) as s:
            async with s.client.post(f"{s.url}/generate", data=pieces(), headers=JSON_TYPE) as r:
                assert r.status == 200
            assert [len(b["text"]) for b in s.pool("long")[0].bodies] == [100_000]

    asyncio.run(run())
