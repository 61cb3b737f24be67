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
from rounds import until_seen
from served import (
    CHUNK,
    LAPS,
    NORMAL_LOOP,
    SEVERAL,
    Beside,
    Prefill,
    Reference,
    Setup,
    ask,
    checkpoint,
    ids,
    on,
    send_all,
)

from benchmark.rig import servers

DP2 = Setup("dp2", (*LAPS, *NORMAL_LOOP, "--dp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, group=SEVERAL)
pytestmark = [pytest.mark.timeout(600), *on(DP2)]
NEW = 6


def requests(prefill: Prefill) -> list[int]:
    """Return the number of requests that each rank has prefilled."""
    ranks = prefill.get("/laps_status")["ranks"]
    assert [r["dp_rank"] for r in ranks] == [0, 1]
    return [sum(t["requests"] for t in r["totals"].values()) for r in ranks]


def test_a_room_names_the_rank(prefill: Prefill) -> None:
    before = requests(prefill)
    for i, room in enumerate((2, 1 << 61, 40, (1 << 62) + 1, 7)):
        status, text = prefill.post("/generate", ask(room, ids(9000 + i, 40)))
        assert status == 200, text
    assert [b - a for a, b in zip(before, requests(prefill), strict=True)] == [3, 2]


def test_the_server_says_what_the_router_reads(prefill: Prefill) -> None:
    assert prefill.get("/laps_status")["dp_size"] == 2
    assert sorted(r["dp_rank"] for r in prefill.get("/v1/loads?include=core")["loads"]) == [0, 1]
    info = prefill.get("/server_info")
    assert (info["dp_size"] * info["attn_dp_size"], info["load_balance_method"]) == (2, "follow_bootstrap_room")


def test_receipts_are_those_of_all_ranks(prefill: Prefill) -> None:
    asyncio.run(send_all(prefill, [ids(700 + i, 40) for i in range(12)]))
    receipts = prefill.get("/laps_receipts?seconds=60")["receipts"]
    assert {r["dp_rank"] for r in receipts} == {0, 1}
    # The controller that distributes requests passes their arrival times on.
    assert all({"tokenizing", "computing", "answering"} <= r["causes"].keys() for r in receipts if not r["aborted"])
    slowest = prefill.get("/laps_receipts?slowest=5")["receipts"]
    assert [r["ttft_ms"] for r in slowest] == sorted((r["ttft_ms"] for r in slowest), reverse=True)
    assert {e["pid"] for e in prefill.get("/laps_trace?seconds=60")["traceEvents"]} == {1, 2}


@pytest.fixture(scope="module")
def router(prefill: Prefill, beside: Beside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    server, decode = prefill.server, beside.decode(tmp_path_factory)
    log = tmp_path_factory.mktemp("router") / "log"
    made = servers.minilb(
        [server], [decode], log, "--enable-laps-alloc", "--laps-rebalance-interval-s", "2.5",
        "--laps-tokenizer", str(checkpoint()), "--health-check-interval-secs", "1",
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


def test_chats_stay_with_their_ranks_and_both_ranks_hand_over(
    router: servers.Server, prefill: Prefill, reference: Reference
) -> None:
    before, histories = requests(prefill), [ids(9200 + i, CHUNK + 40 * i) for i in range(4)]
    params = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}

    async def turn(http: Any, prompt: list[int]) -> tuple[list[int], int]:
        body = {"input_ids": prompt, "sampling_params": params}
        async with http.post(router.url + "/generate", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return list(answer["output_ids"]), int(answer["meta_info"]["cached_tokens"])

    async def run() -> None:
        async with load.session() as http:
            for n in range(3):
                replies = await asyncio.gather(*(turn(http, h) for h in histories))
                for i, (answer, _) in enumerate(replies):
                    assert answer == reference.greedy(histories[i], NEW), (n, i)
                    histories[i] += [*answer, *ids(9300 + 10 * n + i, 20)]

    computed = prefill.totals()
    asyncio.run(run())
    assert all(b > a for a, b in zip(before, requests(prefill), strict=True))
    # Twelve turns of over 500 tokens: of the eight later turns only new tokens were computed.
    after = prefill.totals()
    tokens = sum(after[c]["tokens"] - computed[c]["tokens"] for c in after)
    first = sum(CHUNK + 40 * i for i in range(4))
    assert first <= tokens <= first + 8 * (NEW + 20 + 64)
    # The router also reads the decode server's KV usage.
    (decode,) = status(router)["decode"]
    assert decode["kv_tokens"]["capacity"] > 0


def test_the_prompts_of_a_batch_of_completions_meet_on_one_rank(router: servers.Server) -> None:
    """SGLang distributes prompts by their rooms; from a single room it would count up one room for each prompt."""

    async def run() -> None:
        async with load.session() as http, asyncio.timeout(390):
            for n in range(3):
                prompts = [ids(9400 + 10 * n + i, 60) for i in range(3)]
                body = {"model": "m", "prompt": prompts, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
                async with http.post(router.url + "/v1/completions", json=body) as reply:
                    answer = await reply.json()
                    assert reply.status == 200, answer
                assert answer["usage"]["prompt_tokens"] == 180
                assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 3

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_the_router_has_a_receipt_from_end_to_end(router: servers.Server, stream: bool) -> None:
    params = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", RECEIPT_HEADER: "1"}
    said: list[dict[str, float]] = []

    def once(i: int) -> bool:
        prompt = ids(9500 + 2 * i + stream, 300)
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

    until_seen(once, "a transfer and the router take time", lambda: said)
