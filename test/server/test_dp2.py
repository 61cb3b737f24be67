"""Two DP ranks: the bootstrap room selects the rank of a request, and the router chooses the rank that holds its
history."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import http_load as load
import pytest
from laps_core.receipts.receipt import RECEIPT_HEADER
from rounds import repeat_until
from served import (
    CHUNK,
    LAPS,
    NORMAL_LOOP,
    SEVERAL_SERVERS,
    Prefill,
    Reference,
    Setup,
    SharedServers,
    make_checkpoint,
    random_prompt,
    request_body,
    run_on,
    send_all,
)

from benchmark.rig import servers

DP2 = Setup(
    "dp2", (*LAPS, *NORMAL_LOOP, "--dp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, group=SEVERAL_SERVERS
)
pytestmark = [pytest.mark.timeout(600), *run_on(DP2)]
NEW = 6


def requests(prefill: Prefill) -> list[int]:
    """Return the number of requests that each rank has prefilled."""
    ranks = prefill.get("/laps_status")["ranks"]
    assert [r["dp_rank"] for r in ranks] == [0, 1]
    return [sum(t["requests"] for t in r["totals"].values()) for r in ranks]


def test_bootstrap_room_selects_dp_rank(prefill: Prefill) -> None:
    before = requests(prefill)
    for i, room in enumerate((2, 1 << 61, 40, (1 << 62) + 1, 7)):
        status, text = prefill.post("/generate", request_body(room, random_prompt(9000 + i, 40)))
        assert status == 200, text
    assert [b - a for a, b in zip(before, requests(prefill), strict=True)] == [3, 2]


def test_server_reports_dp_fields_that_router_reads(prefill: Prefill) -> None:
    assert prefill.get("/laps_status")["dp_size"] == 2
    assert sorted(r["dp_rank"] for r in prefill.get("/v1/loads?include=core")["loads"]) == [0, 1]
    info = prefill.get("/server_info")
    assert (info["dp_size"] * info["attn_dp_size"], info["load_balance_method"]) == (2, "follow_bootstrap_room")


def test_receipts_and_trace_cover_all_dp_ranks(prefill: Prefill) -> None:
    asyncio.run(send_all(prefill, [random_prompt(700 + i, 40) for i in range(12)]))
    receipts = prefill.get("/laps_receipts?seconds=60")["receipts"]
    assert {r["dp_rank"] for r in receipts} == {0, 1}
    # The controller that distributes requests passes their arrival times on.
    assert all({"tokenizing", "computing", "answering"} <= r["causes"].keys() for r in receipts if not r["aborted"])
    slowest = prefill.get("/laps_receipts?slowest=5")["receipts"]
    assert [r["ttft_ms"] for r in slowest] == sorted((r["ttft_ms"] for r in slowest), reverse=True)
    assert {e["pid"] for e in prefill.get("/laps_trace?seconds=60")["traceEvents"]} == {1, 2}


@pytest.fixture(scope="module")
def router(
    prefill: Prefill, shared_servers: SharedServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Server]:
    server, decode = prefill.server, shared_servers.decode(tmp_path_factory)
    log = tmp_path_factory.mktemp("router") / "log"
    made = servers.minilb(
        [server], [decode], log, "--enable-laps-alloc", "--laps-rebalance-interval-s", "2.5",
        "--laps-tokenizer", str(make_checkpoint()), "--health-check-interval-secs", "1",
        module="sglang_router_laps.launch_router",
    )  # fmt: skip
    with servers.running(made):
        end = time.monotonic() + 180
        while [len(p.get("ranks", ())) for p in status(made)["prefill"]] != [2]:
            assert time.monotonic() < end, status(made)
            time.sleep(0.2)
        yield made


def status(router: servers.Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{router.url}/laps_status", timeout=180) as reply:
        return dict(json.load(reply))


def test_chats_reuse_cached_history_and_use_both_dp_ranks(
    router: servers.Server, prefill: Prefill, reference: Reference
) -> None:
    params = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}

    async def turn(http: Any, prompt: list[int]) -> tuple[list[int], int]:
        body = {"input_ids": prompt, "sampling_params": params}
        async with http.post(router.url + "/generate", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return list(answer["output_ids"]), int(answer["meta_info"]["cached_tokens"])

    async def run(seed: int) -> None:
        histories = [random_prompt(seed + i, CHUNK + 40 * i) for i in range(4)]
        async with load.session() as http:
            for n in range(3):
                replies = await asyncio.gather(*(turn(http, h) for h in histories))
                for i, (answer, _) in enumerate(replies):
                    assert answer == reference.greedy(histories[i], NEW), (n, i)
                    histories[i] += [*answer, *random_prompt(seed + 100 + 10 * n + i, 20)]

    first, said = sum(CHUNK + 40 * i for i in range(4)), list[int]()

    def attempt(i: int) -> bool:
        """Return True if of the eight later turns, each of over 500 tokens, only new tokens were computed, and by both
        ranks. The router may leave a history, or a rank, that was slow for a moment."""
        before, computed = requests(prefill), prefill.totals()
        asyncio.run(run(9200 + 10_000 * i))
        both = all(b > a for a, b in zip(before, requests(prefill), strict=True))
        after = prefill.totals()
        said.append(sum(after[c]["tokens"] - computed[c]["tokens"] for c in after))
        assert said[-1] >= first
        return both and said[-1] <= first + 8 * (NEW + 20 + 64)

    repeat_until(attempt, "later turns reuse their histories", lambda: (first, said))
    # The router also reads the decode server's KV usage.
    (decode,) = status(router)["decode"]
    assert decode["kv_tokens"]["capacity"] > 0


def test_completion_batch_of_several_prompts_is_answered(router: servers.Server) -> None:
    """SGLang distributes prompts by their rooms; from a single room it would count up one room for each prompt."""

    async def run() -> None:
        async with load.session() as http, asyncio.timeout(390):
            for n in range(3):
                prompts = [random_prompt(9400 + 10 * n + i, 60) for i in range(3)]
                body = {"model": "m", "prompt": prompts, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
                async with http.post(router.url + "/v1/completions", json=body) as reply:
                    answer = await reply.json()
                    assert reply.status == 200, answer
                assert answer["usage"]["prompt_tokens"] == 180
                assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 3

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_router_client_gets_end_to_end_receipt(router: servers.Server, stream: bool) -> None:
    params = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", RECEIPT_HEADER: "1"}
    said: list[dict[str, float]] = []

    def attempt(i: int) -> bool:
        prompt = random_prompt(9500 + 2 * i + stream, 300)
        body = json.dumps({"input_ids": prompt, "sampling_params": params, "stream": stream}).encode()
        begin, asked = time.perf_counter(), urllib.request.Request(router.url + "/generate", body, headers)
        with urllib.request.urlopen(asked, timeout=300) as reply:
            reply.readline()
            took_ms = 1e3 * (time.perf_counter() - begin)
            receipt = json.loads(reply.headers[RECEIPT_HEADER])
        causes = receipt["causes"]
        said.append(causes)
        assert {"tokenizing", "decode_room", "computing"} <= causes.keys()
        assert abs(sum(causes.values()) - receipt["ttft_ms"]) < 0.01
        assert min(causes.values()) > 0.0
        assert receipt["ttft_ms"] <= took_ms
        # The decode server can stream the first token before the prefill server's receipt reaches the router.
        return stream or {"transfer", "router"} <= causes.keys()

    repeat_until(attempt, "a transfer and the router take time", lambda: said)
