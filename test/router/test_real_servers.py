"""The router in front of real SGLang servers: two prefill servers with LAPS, one decode server."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import http_load as load
import pytest
from hostile import FATAL
from rounds import repeat_until
from served import NORMAL, Prefill, SharedServers, make_checkpoint, prefill_server, run_on

from benchmark.load.prompts import FAKE_BOOTSTRAP_HOST
from benchmark.rig import servers

pytestmark = [pytest.mark.timeout(600), *run_on(NORMAL)]

CONFIG = {"spill": "off", "initial_short": 1}
SHORT = "What is the weather like?"
LONG = "Tell me a story of the sea and of the wind, and begin again. " * 60


class Rig:
    """Running servers and router, with the requests and checks of the tests."""

    def __init__(self, prefills: list[servers.Server], decode: servers.Server, router: servers.Server):
        self.prefills, self.decode, self.router = prefills, decode, router

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.router.url}/laps_status", timeout=180) as reply:
            return dict(json.load(reply))

    def member(self, pool: str) -> servers.Server:
        (url,) = self.status()["pools"][pool]
        return next(p for p in self.prefills if p.url == url)

    def until(self, true: Any, timeout_s: float = 120.0) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            found = self.status()
            if true(found):
                return found
            time.sleep(0.2)
        raise AssertionError(found)

    def at_rest(self) -> dict[str, Any]:
        """Wait until the router has nothing in flight, then require that every counter is zero."""
        found = self.until(lambda s: s["in_flight"] == 0)
        for i in (*found["prefill"], *found["decode"]):
            assert (i["outstanding_requests"], i["outstanding_tokens"]) == (0, 0), i
        return found


@pytest.fixture(scope="module")
def rig(prefill: Prefill, shared_servers: SharedServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    logs = tmp_path_factory.mktemp("rig")
    another = prefill_server(NORMAL, logs, "another prefill server").start()
    decode = shared_servers.decode(tmp_path_factory)
    prefills = [prefill.server, another]
    router = servers.minilb(
        prefills, [decode], logs / "router.log", "--enable-laps-alloc", "--laps-rebalance-interval-s", "2.5",
        "--laps-tokenizer", str(make_checkpoint()), "--laps-alloc-config", json.dumps(CONFIG),
        "--health-check-interval-secs", "1",
        module="sglang_router_laps.launch_router",
    )  # fmt: skip
    with another, servers.running(router):
        another.ready()
        rig = Rig(prefills, decode, router)
        # The router started before the servers and probes them at its own pace.
        rig.until(lambda s: all(i["healthy"] for i in (*s["prefill"], *s["decode"])))
        yield rig


def chat(text: str, new: int = 12) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
    }


async def ask(http: aiohttp.ClientSession, url: str, text: str, new: int = 12) -> load.RequestRecord:
    return await load.stream(http, f"{url}/v1/chat/completions", chat(text, new), "any", time.perf_counter())


def test_chat_streams_equal_stock_router_for_both_classes(rig: Rig, tmp_path: Path) -> None:
    before = rig.status()
    stock = servers.minilb(rig.prefills, [rig.decode], tmp_path / "stock.log", name="stock router")

    async def both(url: str) -> list[load.RequestRecord]:
        async with load.session() as http:
            return list(await asyncio.gather(*(ask(http, url, t) for t in (SHORT, LONG))))

    ours = asyncio.run(both(rig.router.url))
    with servers.running(stock):
        theirs = asyncio.run(both(stock.url))
    assert [s.error for s in (*ours, *theirs)] == [None] * 4
    assert all(s.text for s in ours)
    assert [s.text for s in ours] == [s.text for s in theirs]
    after = rig.at_rest()
    assert {p: after["counts"]["requests"][p] - before["counts"]["requests"][p] for p in ("short", "long")} == {
        "short": 1,
        "long": 1,
    }
    # The router reads the load of a newly healthy server at its next beat.
    rig.until(lambda s: {p["signals"]["source"] for p in s["prefill"]} == {"laps_status"})


def test_fatal_requests_end_no_server(rig: Rig) -> None:
    async def scenario() -> None:
        async with load.session() as http:
            for name, (fields, sampling) in FATAL.items():
                body = {"input_ids": [5, 6], **fields, "sampling_params": {"max_new_tokens": 4, **sampling}}
                async with http.post(rig.router.url + "/generate", json=body) as reply:
                    answer = await reply.text()
                    # The router gives each request a bootstrap room of its own.
                    assert reply.status == (200 if "bootstrap_room" in fields else 400), (name, answer)
                sample = await ask(http, rig.router.url, SHORT)
                assert sample.error is None, name

    asyncio.run(scenario())
    assert all(server.alive() for server in (*rig.prefills, rig.decode))
    rig.at_rest()


def test_token_counts_are_exact_with_tokenizer(rig: Rig) -> None:
    """Compare the new tokens expected by the router with those reported by the prefill server."""
    text = "counted: " + SHORT
    before = rig.status()["counts"]["tokens"]["short"]
    request = urllib.request.Request(
        f"{rig.router.url}/v1/completions",
        json.dumps({"model": "m", "prompt": text, "max_tokens": 2}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=180) as reply:
        used = json.load(reply)["usage"]["prompt_tokens"]
    assert rig.at_rest()["counts"]["tokens"]["short"] - before == used


def test_short_pool_serves_shared_system_prompt(rig: Rig) -> None:
    system = "You answer questions about the sea, the wind and the weather, briefly and kindly. " * 30
    system = system[:1500]

    def asking(i: int) -> dict[str, Any]:
        body = chat(f"Question {i}: what is that?", new=4)
        return {**body, "messages": [{"role": "system", "content": system}, *body["messages"]]}

    def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return dict(json.load(reply))

    def served() -> dict[str, int]:
        return {p["pool"]: p["served"] for p in rig.at_rest()["prefill"]}

    before = served()
    prompt = post(rig.router.url, asking(0))["usage"]["prompt_tokens"]
    assert prompt > 256
    assert served() == {**before, "long": before["long"] + 1}
    for i in range(1, 24):
        post(rig.router.url, asking(i))
    after = served()
    # The first requests show that the prompt is shared; then the short pool computes it once. Later requests go to the
    # server that answers first; between two idle servers that depends on their latency models.
    assert after["short"] > before["short"]
    bootstrap = {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_port": 8998, "bootstrap_room": 1}
    usage = post(rig.member("short").url, {**asking(99), **bootstrap})["usage"]
    assert prompt - usage["prompt_tokens_details"]["cached_tokens"] <= 256


def test_disconnects_leave_router_and_servers_idle(rig: Rig) -> None:
    before = rig.status()["counts"]["disconnected"]

    async def leave(http: aiohttp.ClientSession, i: int) -> None:
        text = f"{i} {LONG if i % 2 else SHORT}"
        try:
            async with asyncio.timeout(0.05 + 0.03 * (i % 12)):
                await ask(http, rig.router.url, text, new=200)
        except TimeoutError:
            pass

    async def run(first: int) -> None:
        async with load.session() as http:
            await asyncio.gather(*(leave(http, first + i) for i in range(40)))

    def attempt(i: int) -> bool:
        asyncio.run(run(1000 * i))
        return bool(rig.at_rest()["counts"]["disconnected"] - before >= 20)

    repeat_until(attempt, "clients leave what has reached the router")
    end = time.monotonic() + 120
    for server in (*rig.prefills, rig.decode):
        while True:
            with urllib.request.urlopen(f"{server.url}/v1/loads?include=core", timeout=180) as reply:
                loads = json.load(reply)["loads"]
            if all(x["num_running_reqs"] + x["num_waiting_reqs"] == 0 for x in loads):
                break
            assert time.monotonic() < end, (server.name, loads)
            time.sleep(0.3)


def test_duplicate_rid_is_refused_and_router_abort_ends_request(rig: Rig) -> None:
    body = {
        "text": SHORT, "rid": "mine", "stream": True,
        "sampling_params": {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True},
    }  # fmt: skip

    async def run() -> None:
        async with load.session() as http:
            async with http.post(f"{rig.router.url}/generate", json=body) as first:
                assert await first.content.readany()
                async with http.post(f"{rig.router.url}/generate", json={**body, "stream": False}) as second:
                    assert second.status == 400
                    assert b"mine" in await second.read()
                # The first request continues.
                assert await first.content.readany()
                assert first.status == 200
                async with http.post(f"{rig.router.url}/abort_request", json={"rid": "mine"}) as abort:
                    assert (abort.status, await abort.read()) == (200, b"")
                async with asyncio.timeout(120):
                    rest = await first.read()
            events = [json.loads(e[5:]) for e in rest.split(b"\n\n") if e.startswith(b"data: {")]
            assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
            assert events[-1]["meta_info"]["completion_tokens"] < 4000

    before = rig.status()["counts"]["failed"]
    asyncio.run(run())
    assert rig.at_rest()["counts"]["failed"] == before


def test_killed_prefill_server_loses_no_request_and_recovers(rig: Rig) -> None:
    victim = rig.member("long")
    url = victim.url

    async def run(*, killing: bool = False, mark: str = "", n: int = 8) -> list[load.RequestRecord]:
        async with load.session() as http:
            sent = [asyncio.create_task(ask(http, rig.router.url, f"{mark}{i} {LONG * 3}")) for i in range(n)]
            if killing:
                await asyncio.sleep(0.3)
                await asyncio.to_thread(victim.kill)
            return list(await asyncio.gather(*sent))

    seen = asyncio.run(run(killing=True))
    # Requests whose stream has begun continue at the decode server, which has their KV, so nothing is lost here.
    assert [s.error for s in seen] == [None] * 8
    found = rig.at_rest()
    assert found["counts"]["retried"] >= 1
    assert not next(p for p in found["prefill"] if p["url"] == url)["healthy"]

    victim.start().ready()
    rig.until(lambda s: all(p["healthy"] for p in s["prefill"]))
    before = next(p for p in rig.status()["prefill"] if p["url"] == url)["served"]

    again = asyncio.run(run())
    assert [(s.error, s.text) for s in again] == [(None, s.text) for s in seen]
    # These requests went to a cached prefix or an idle server; a new long prompt goes to the restarted server.
    served = next(p for p in rig.at_rest()["prefill"] if p["url"] == url)["served"]
    assert before <= served <= before + 8
    assert [s.error for s in asyncio.run(run(mark="new ", n=1))] == [None]
    assert next(p for p in rig.at_rest()["prefill"] if p["url"] == url)["served"] == served + 1
