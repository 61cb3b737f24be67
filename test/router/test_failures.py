"""Servers that hang, die or fail, and a router that runs out of things: who is blamed, and what clients get."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from aiohttp import web

from .fakes import Body, FakeDecode, FakePrefill, FakeServer, Stack, World, answer, stack

REPO = Path(__file__).resolve().parents[2]
SHORT = "a" * 40
LONG = "b" * 8000
PROBES = {"health_check_interval_secs": 0.3, "health_check_timeout_secs": 0.3}
NO_PROBES = {"disable_health_check": True}


async def said(response: aiohttp.ClientResponse) -> list[str]:
    return [e[6:] for e in (await response.text()).split("\n\n") if e.startswith("data: ")]


def entry(found: Body, server: FakeServer | str) -> Body:
    url = server if isinstance(server, str) else server.url
    return next(i for i in (*found["prefill"], *found["decode"]) if i["url"] == url)


# -- what is no server's fault


@contextlib.asynccontextmanager
async def separate_router(s: Stack, limit: tuple[int, int] | None, tmp: Path) -> AsyncIterator[tuple[int, str]]:
    """(pid, URL) of a router of its own process in front of the fakes of ``s``."""
    flags = [f for p in s.prefills for f in ("--prefill", p.url, "8998")]
    flags += [f for d in s.decodes for f in ("--decode", d.url)]
    with (tmp / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sglang_router_laps.launch_router", "--mini-lb", "--pd-disaggregation",
            "--enable-laps-alloc", "--host", "127.0.0.1", "--port", "0", *flags, stdout=log, stderr=log,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)) if limit else None,
        )  # fmt: skip
        try:
            async with asyncio.timeout(180):
                while b"running on http://" not in (text := (tmp / "router.log").read_bytes()):
                    assert process.returncode is None, text.decode()
                    await asyncio.sleep(0.05)
            url = text.split(b"running on ", 1)[1].split()[0].decode()
            yield process.pid, url
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def test_no_descriptors_left_is_503_and_blames_no_server(tmp_path: Path) -> None:
    async def run() -> None:
        async with stack(2, 2) as s, separate_router(s, None, tmp_path) as (pid, url):
            async with s.client.post(f"{url}/generate", json={"text": SHORT}) as r:
                assert r.status == 200
            # The router closes idle connections to the servers after 4 s; only then a new one is needed.
            async with asyncio.timeout(120):
                while any(f.connections for f in (*s.prefills, *s.decodes)) or s.decodes[0].port in open_ports(pid):
                    await asyncio.sleep(0.2)
            async with aiohttp.ClientSession() as client:
                async with client.get(f"{url}/laps_status") as r:
                    await r.read()
                before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                # Below what is open already: what is there stays, and nothing new can be had.
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
                async with client.post(f"{url}/generate", json={"text": LONG}) as r:
                    # Read to its end, the connection serves again: a new one could not be accepted.
                    await r.read()
                    assert r.status == 503
                    assert r.headers["retry-after"] == "1"
                async with client.get(f"{url}/laps_status") as r:
                    found = await r.json()
                assert all(i["healthy"] and not i["lost"] for i in (*found["prefill"], *found["decode"]))
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
                async with client.post(f"{url}/generate", json={"text": LONG}) as r:
                    assert r.status == 200

    asyncio.run(run())


def open_ports(pid: int) -> set[int]:
    """Remote ports that the process is connected to."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd))
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        field = line.split()
        if f"socket:[{field[9]}]" in inodes:
            found.add(int(field[2].split(":")[1], 16))
    return found


def test_sixty_descriptors_serve_as_many_as_they_can(tmp_path: Path) -> None:
    async def run() -> None:
        def slow(world: World) -> FakeDecode:
            return FakeDecode(world, pause_s=0.1)

        async with (
            stack(2, 2, make_decode=slow) as s,
            separate_router(s, (60, 60), tmp_path) as (_, url),
            aiohttp.ClientSession() as client,
        ):
            async with client.get(f"{url}/laps_status") as r:
                assert (await r.json())["max_inflight"] < 20

            async def one() -> int:
                async with client.post(f"{url}/generate", json={"text": SHORT}) as r:
                    await r.read()
                    return r.status

            statuses = await asyncio.gather(*(one() for _ in range(20)))
            assert set(statuses) <= {200, 503}
            assert 200 in statuses
            async with client.get(f"{url}/laps_status") as r:
                found = await r.json()
            assert all(i["healthy"] for i in (*found["prefill"], *found["decode"]))

    asyncio.run(run())


def test_the_descriptor_limit_is_raised_at_start(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run() -> None:
        async with stack(2) as s, separate_router(s, (128, hard), tmp_path) as (pid, _):
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)

    asyncio.run(run())


async def whole(s: Stack, **body: Any) -> tuple[int, bytes]:
    async with s.client.post(f"{s.url}/generate", json=body) as r:
        return r.status, await r.read()


class NoName(aiohttp.abc.AbstractResolver):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def resolve(self, *_: Any, **__: Any) -> Any:
        raise OSError(-3, "Temporary failure in name resolution")

    async def close(self) -> None:
        pass


def test_a_name_that_does_not_resolve_is_no_dead_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiohttp.connector.DefaultResolver", NoName)

    async def run() -> None:
        async with stack(2, 0, more_decodes=["http://decode.example:1"], args=NO_PROBES) as s:
            for _ in range(5):
                async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                    assert r.status == 503
                    assert r.headers["retry-after"] == "1"
                    assert "decode.example" in (await r.json())["error"]["message"]
            assert entry(await s.status(), "http://decode.example:1")["healthy"]
            await s.at_rest()

    asyncio.run(run())


def test_tls_that_fails_is_no_dead_server_and_another_serves() -> None:
    async def run() -> None:
        async with stack(2, 1) as plain:
            wrong = plain.decodes[0].url.replace("http:", "https:")
            async with stack(2, 1, more_decodes=[wrong], args=NO_PROBES) as s:
                for _ in range(6):
                    assert (await s.post(text=SHORT))[0] == 200
                found = await s.status()
                assert entry(found, wrong)["healthy"]
                assert found["counts"]["retried"] >= 1

    asyncio.run(run())


# -- servers that hang


class Hanging:
    """While ``hung``, everything is accepted and nothing is answered."""

    hung = False

    async def _wait(self) -> None:
        if self.hung:
            await asyncio.Event().wait()


class HangingPrefill(Hanging, FakePrefill):
    async def _health(self, request: web.Request) -> web.Response:
        await self._wait()
        return await super()._health(request)

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await self._wait()
        return await super().serve(request, body)


class HangingDecode(Hanging, FakeDecode):
    async def _health(self, request: web.Request) -> web.Response:
        await self._wait()
        return await super()._health(request)

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await self._wait()
        return await super().serve(request, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_waits_at_a_server_that_hangs_is_answered_by_another(role: str, stream: bool) -> None:
    async def run() -> None:
        async with stack(
            2, 2, args=PROBES, config={"spill": "off"}, make_prefill=HangingPrefill, make_decode=HangingDecode
        ) as s:
            victim: Any = s.pool("short")[0] if role == "prefill" else s.decodes[0]
            victim.hung = True
            async with asyncio.timeout(180):
                replies = await asyncio.gather(*(whole(s, text=SHORT, stream=stream) for _ in range(6)))
            assert [status for status, _ in replies] == [200] * 6
            assert all(b"t2" in reply for _, reply in replies)
            found = await s.status()
            assert not entry(found, victim)["healthy"]
            assert found["counts"]["failed"] == 0
            victim.hung = False
            await s.at_rest()

    asyncio.run(run())


STOPPABLE = """
import asyncio
from aiohttp import web

async def health(request):
    return web.Response()

async def generate(request):
    await request.read()
    return web.json_response({"text": "t", "meta_info": {"prompt_tokens": 1}})

async def main():
    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print("http://127.0.0.1:%d" % runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_stopped_process_is_left_and_taken_back() -> None:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STOPPABLE, cwd=REPO, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout
            async with asyncio.timeout(180):
                url = (await process.stdout.readline()).decode().strip()
            async with stack(2, 1, more_decodes=[url], args=PROBES) as s:
                assert [(await s.post(text=SHORT))[0] for _ in range(2)] == [200] * 2
                process.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(180):
                    replies = await asyncio.gather(*(s.post(text=SHORT) for _ in range(8)))
                assert [status for status, _ in replies] == [200] * 8
                assert not entry(await s.status(), url)["healthy"]
                process.send_signal(signal.SIGCONT)
                instance = next(i for i in s.lb.decoders if i.url == url)
                await s.until(lambda: instance.healthy, timeout=120)
                await s.at_rest()
        finally:
            process.kill()
            await process.wait()

    asyncio.run(run())


def test_time_outs_are_failures_of_a_server_that_says_nothing() -> None:
    async def run() -> None:
        async with stack(2, args={"request_timeout_secs": 0.3, **NO_PROBES}, config={"spill": "off"}) as s:
            short = s.pool("short")[0]
            short.gate.clear()
            instance = s.lb.pools.by_url(short.url)
            assert [(await s.post(text=SHORT))[0] for _ in range(3)] == [504] * 3
            assert not instance.healthy
            # The decode server waited with it, but answers others.
            assert (await s.post(text=SHORT))[0] == 200
            short.gate.set()

    asyncio.run(run())


def test_a_busy_server_is_not_taken_for_a_hung_one() -> None:
    async def run() -> None:
        args = {"health_check_interval_secs": 0.2, "health_check_timeout_secs": 0.2}
        async with stack(2, args=args, make_decode=lambda w: HangingDecode(w, chunks=60, pause_s=0.05)) as s:
            decode: Any = s.decodes[0]
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                await r.content.readany()
                # It still sends tokens, but answers no probe any more.
                decode.hung = True
                assert b"[DONE]" in await r.read()
            assert s.lb.decoders[0].healthy
            decode.hung = False

    asyncio.run(run())


# -- servers that fail


def test_a_server_that_fails_fast_does_not_draw_the_traffic() -> None:
    async def run() -> None:
        async with stack(2, 2, args={"cb_timeout_duration_secs": 1, "cb_failure_threshold": 5}) as s:
            sick, well = s.decodes
            sick.status = 500
            statuses = []
            for _ in range(25):
                statuses += [status for status, _ in await asyncio.gather(*(s.post(text=SHORT) for _ in range(4)))]
            found = await s.status()
            assert statuses.count(500) < 25
            assert statuses.count(200) == 100 - statuses.count(500)
            assert entry(found, sick)["breaker"] in ("open", "half_open")
            assert entry(found, well)["breaker"] == "closed"
            async with s.client.get(f"{s.url}/metrics") as r:
                text = await r.text()
            line = next(x for x in text.splitlines() if x.startswith("laps_router_breaker_state") and sick.url in x)
            assert float(line.rsplit(" ", 1)[1]) > 0

            sick.status = 200
            instance = next(i for i in s.lb.decoders if i.url == sick.url)
            async with asyncio.timeout(120):
                while instance.breaker.state != "closed":
                    assert (await s.post(text=SHORT))[0] == 200
            await s.at_rest()

    asyncio.run(run())


def test_without_the_breaker_it_does() -> None:
    async def run() -> None:
        async with stack(2, 2, args={"disable_circuit_breaker": True}) as s:
            s.decodes[0].status = 500
            assert [(await s.post(text=SHORT))[0] for _ in range(40)].count(500) > 15

    asyncio.run(run())


def test_the_last_server_is_asked_although_its_breaker_is_open() -> None:
    async def run() -> None:
        async with stack(2, 1, args={"cb_failure_threshold": 2}) as s:
            s.decodes[0].status = 500
            assert [(await s.post(text=SHORT))[0] for _ in range(4)] == [500] * 4
            s.decodes[0].status = 200
            assert (await s.post(text=SHORT))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_503_is_tried_elsewhere(role: str) -> None:
    async def run() -> None:
        async with stack(2, 2, config={"spill": "off"}) as s:
            sick = s.pool("short")[0] if role == "prefill" else s.decodes[0]
            sick.status = 503
            assert [(await s.post(text=SHORT))[0] for _ in range(8)] == [200] * 8
            assert (await s.status())["counts"]["retried"] >= 1
            await s.at_rest()

    asyncio.run(run())


class Unjoined(FakePrefill):
    """Its transfers fail, as when the decode server has just died."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        message = f"Prefill transfer failed for request req.rid={body['rid']!r} with exception KVTransferError: dead"
        return web.json_response({"error": {"message": message}}, status=500)


def test_a_transfer_that_failed_is_tried_again() -> None:
    async def run() -> None:
        kinds = iter((Unjoined, FakePrefill, FakePrefill))
        async with stack(3, 2, make_prefill=lambda world: next(kinds)(world), config={"spill": "off"}) as s:
            for i in s.lb.pools.instances[:2]:
                i.pool = "short"
            assert [(await s.post(text=SHORT))[0] for _ in range(8)] == [200] * 8
            assert (await s.status())["counts"]["retried"] >= 1

    asyncio.run(run())


def test_a_way_between_two_servers_that_is_cut_is_left_by_either_of_them() -> None:
    """One prefill server only: another decode server makes another pair."""

    async def run() -> None:
        async with stack(2, 2, config={"spill": "off"}, make_prefill=Unjoined) as s:
            for p in s.prefills:
                p.gate.set()
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                assert (r.status, r.headers["retry-after"]) == (503, "1"), "later there may be a way"
                assert "KVTransferError: dead" in (await r.json())["error"]["message"]
            sent = [len(d.bodies) for d in s.decodes]
            assert min(sent) >= 1, "both decode servers were tried"

    asyncio.run(run())


class Unfed(FakeDecode):
    """The KV of the first request does not come, which it finds out when its status line is sent."""

    says: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[Body]] = []

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        self.asked.append(body)
        if len(self.asked) > 1:
            return await super().serve(request, body)
        if not body.get("stream"):
            return web.json_response(self.says)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(self.says).encode() + b"\n\ndata: [DONE]\n\n")
        return response


TRANSFER = {"message": "Decode transfer failed for request rank=0 with exception KVTransferError(1): dead"}
ABORTED = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": TRANSFER["message"]}}}


@pytest.mark.parametrize("says", [{"error": TRANSFER}, ABORTED])
@pytest.mark.parametrize("stream", [False, True])
def test_kv_that_never_came_is_tried_again_though_the_reply_had_begun(says: dict[str, Any], stream: bool) -> None:
    async def run() -> None:
        async with stack(2, 2, make_decode=type("Now", (Unfed,), {"says": says, "asked": []})) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": stream}) as r:
                assert r.status == 200
                text = await r.text()
            assert "KVTransferError" not in text
            assert '"text": "t' in text
            assert (await s.status())["counts"]["retried"] >= 1
            await s.at_rest()

    asyncio.run(run())


def test_an_abort_that_a_client_asked_for_is_passed_on() -> None:
    said = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "Abort by a client"}}}

    async def run() -> None:
        async with stack(2, 2, make_decode=type("Now", (Unfed,), {"says": said, "asked": []})) as s:
            status, answer = await s.post(text=SHORT)
            assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")

    asyncio.run(run())


@pytest.mark.parametrize("rid", ["\ud800", 10**30, ["\ud800", "a"]])
def test_an_id_that_cannot_be_written_goes_as_it_came(rid: Any) -> None:
    async def run() -> None:
        async with stack(2) as s:
            raw = json.dumps({"text": ["a", "b"] if isinstance(rid, list) else "a", "rid": rid})
            async with s.client.post(f"{s.url}/generate", data=raw, headers={"content-type": "application/json"}) as r:
                assert r.status != 500, await r.read()
            await s.at_rest()

    asyncio.run(run())


class Busy(FakeDecode):
    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "17"})


@pytest.mark.parametrize("args", [{}, {"disable_retries": True}, {"retry_max_retries": 1}])
def test_a_503_that_stays_one_says_when_to_come_back(args: Body) -> None:
    async def run() -> None:
        async with stack(2, 2, args=args, make_decode=Busy) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                assert (r.status, r.headers["retry-after"]) == (503, "17")
                assert (await r.json())["error"]["message"] == "full"
            assert sum(len(d.bodies) for d in s.decodes) == (1 if args else 2)
            await s.at_rest()

    asyncio.run(run())


def test_retries_of_all_requests_together_are_bounded() -> None:
    async def run() -> None:
        args = {"retry_initial_backoff_ms": 1, "disable_circuit_breaker": True}
        async with stack(2, 3, args=args, make_decode=Busy) as s:
            for _ in range(15):
                await asyncio.gather(*(s.post(text=SHORT) for _ in range(20)))
            assert sum(len(d.bodies) for d in s.decodes) < 300 + 100 + 0.2 * 300 + 5

    asyncio.run(run())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_that_kills_servers_kills_one(role: str) -> None:
    killed: list[FakeServer] = []

    async def die(server: FakeServer, body: Body) -> None:
        if body["text"].startswith("poison") and server.role == role:
            killed.append(server)
            await asyncio.shield(asyncio.ensure_future(server.stop()))
            await asyncio.Event().wait()

    class MortalPrefill(FakePrefill):
        async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
            await die(self, body)
            return await super().serve(request, body)

    class MortalDecode(FakeDecode):
        async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
            await die(self, body)
            return await super().serve(request, body)

    async def run() -> None:
        async with stack(4, 4, make_prefill=MortalPrefill, make_decode=MortalDecode) as s:
            async with asyncio.timeout(180):
                status, reply = await s.post(text="poison")
            assert (status, reply["error"]["type"]) == (502, "upstream_lost")
            assert len(killed) == 1
            assert (await s.post(text=SHORT))[0] == 200
            await s.at_rest()

    asyncio.run(run())


def test_who_was_there_with_others_is_tried_once_more_and_no_oftener() -> None:
    killed: list[FakeServer] = []

    class Mortal(FakePrefill):
        async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
            if body["text"].startswith("poison"):
                killed.append(self)
                await asyncio.shield(asyncio.ensure_future(self.stop()))
            return await super().serve(request, body)

    async def run() -> None:
        async with stack(6, 1, config={"initial_short": 5}, make_prefill=Mortal) as s:
            # All short requests share a prefix, so that one server has them all.
            shared = "p" * 1000
            assert (await s.post(text=shared))[0] == 200
            busy = next(p for p in s.prefills if p.bodies)
            busy.gate.clear()
            innocent = [asyncio.create_task(s.post(text=shared)) for _ in range(3)]
            await s.until(lambda: sum(p.running for p in s.prefills) == 3)
            for p in s.prefills:
                p.gate.clear()
            poison = asyncio.create_task(s.post(text="poison"))
            await asyncio.wait((poison,), timeout=30)
            for p in s.prefills:
                p.gate.set()
            async with asyncio.timeout(180):
                assert [status for status, _ in await asyncio.gather(*innocent)] == [200] * 3
                assert (await poison)[0] == 502
            assert len(killed) <= 2

    asyncio.run(run())


# -- errors inside replies


class FailingPrefill(FakePrefill):
    """Answers 200 and says in the stream, or in the reply, that it failed."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await self.gate.wait()
        error = {"message": "too long", "type": "BadRequestError", "code": 400}
        return await answer(request, body, [{"error": error}])


class AbortingPrefill(FakePrefill):
    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        reason = {"type": "abort", "message": "no memory", "status_code": 503}
        return await answer(request, body, [{"text": "", "meta_info": {"finish_reason": reason}}])


@pytest.mark.parametrize(
    ("make", "stream", "expected"),
    [
        (FailingPrefill, True, (400, "too long")),
        (FailingPrefill, False, (400, "too long")),
        (AbortingPrefill, True, (503, "no memory")),
        (AbortingPrefill, False, (503, "no memory")),
    ],
)
def test_an_error_inside_the_prefill_reply_is_the_answer_at_once(
    make: Callable[[World], FakePrefill], stream: bool, expected: tuple[int, str]
) -> None:
    async def run() -> None:
        async with stack(2, make_prefill=make) as s:
            async with asyncio.timeout(120):
                async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": stream}) as r:
                    found = (r.status, (await r.json())["error"]["message"])
            assert found == expected
            await s.at_rest()
            # Only the decode server still has it.
            await s.until(lambda: len(s.decodes[0].aborted) >= 1)
            assert not any(p.aborted for p in s.prefills)

    asyncio.run(run())


class HalfDecode(FakeDecode):
    """Sends the first prompt's events of a batch, then waits for the second, which never comes."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "t0", "index": 0}\n\n')
        await asyncio.Event().wait()
        return response


def test_a_prefill_error_after_the_stream_has_begun_ends_the_stream() -> None:
    def late(world: World) -> FakePrefill:
        p = FailingPrefill(world)
        p.gate.clear()
        return p

    async def run() -> None:
        async with stack(2, make_prefill=late, make_decode=HalfDecode) as s:
            async with asyncio.timeout(120):
                async with s.client.post(f"{s.url}/generate", json={"text": [SHORT, SHORT], "stream": True}) as r:
                    assert r.status == 200
                    await r.content.readany()
                    for p in s.prefills:
                        p.gate.set()
                    events = await said(r)
            assert json.loads(events[-1])["error"]["message"] == "too long"
            await s.at_rest()

    asyncio.run(run())


class BreakingDecode(FakeDecode):
    """Breaks the connection in the middle of its second event."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "t0"}\n\ndata: {"text": "half of')
        # What has been written must have left before the connection is cut.
        await asyncio.sleep(0.2)
        assert request.transport is not None
        request.transport.abort()
        return response


def test_a_stream_that_breaks_inside_an_event_ends_with_one_error_event() -> None:
    async def run() -> None:
        async with stack(2, make_decode=BreakingDecode) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                events = [json.loads(e) for e in await said(r)]
            assert [e.get("text") for e in events] == ["t0", None]
            assert events[-1]["error"]["type"] == "upstream_lost"

    asyncio.run(run())


class SlowPieces(FakeDecode):
    """Writes each event in pieces that end anywhere."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in (b"data: {", b'"text": 1}\n', b'\ndata: {"text": 2}\n\nda', b"ta: [DONE]\n\n", b"rest"):
            await response.write(piece)
            await asyncio.sleep(0.05)
        await response.write_eof()
        return response


def test_a_stream_in_pieces_arrives_whole() -> None:
    async def run() -> None:
        async with stack(2, make_decode=SlowPieces) as s:
            body = {"text": SHORT, "stream": True}
            async with s.client.post(f"{s.url}/generate", json=body) as r:
                assert await r.read() == b'data: {"text": 1}\n\ndata: {"text": 2}\n\ndata: [DONE]\n\nrest'

    asyncio.run(run())


# -- what a long decode holds on to


class Forgetful:
    """Keeps nothing of a request's body."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        async for _ in request.content.iter_any():
            pass
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "t0"}\n\n')
        if isinstance(self, FakeDecode):
            await self.world.event(0).wait()
        await response.write_eof()
        return response


class ForgetfulPrefill(Forgetful, FakePrefill):
    pass


class ForgetfulDecode(Forgetful, FakeDecode):
    pass


def test_a_body_is_let_go_of_when_the_stream_has_begun() -> None:
    size, n = 2_000_000, 8
    raw = json.dumps({"stream": True, "text": "x" * size}).encode()

    async def run() -> None:
        async with (
            stack(2, make_prefill=ForgetfulPrefill, make_decode=ForgetfulDecode) as s,
            contextlib.AsyncExitStack() as open_,
        ):
            tracemalloc.start()
            try:
                for _ in range(n):
                    r = await open_.enter_async_context(s.client.post(f"{s.url}/generate", data=raw))
                    assert await r.content.readany()
                await s.until(lambda: all(i.outstanding == 0 for i in s.lb.pools.instances))
                end = time.monotonic() + 20
                while (held := tracemalloc.get_traced_memory()[0]) > n * size / 4 and time.monotonic() < end:
                    await asyncio.sleep(0.1)
            finally:
                tracemalloc.stop()
            assert s.lb.places.taken == n
            assert held < n * size / 4
            s.decodes[0].world.event(0).set()

    asyncio.run(run())


# -- what watches


def test_a_watcher_that_fails_starts_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_router_laps.servers.health import Health

    probe = Health._probe
    probed: dict[str, int] = {}
    bad: list[str] = []

    async def failing(self: Health, instance: Any) -> str | None:
        probed[instance.url] = probed.get(instance.url, 0) + 1
        if instance.url in bad:
            raise RuntimeError("not a URL that can be asked")
        return await probe(self, instance)

    monkeypatch.setattr(Health, "_probe", failing)

    async def run() -> None:
        async with stack(2, 2, args={"health_check_interval_secs": 0.1}) as s:
            await s.until(lambda: len(probed) == 4)
            bad.append(s.decodes[0].url)
            seen = probed[s.decodes[0].url]
            await s.until(lambda: probed[s.decodes[0].url] > seen + 1, timeout=120)
            others = {u: n for u, n in probed.items() if u not in bad}
            await s.until(lambda: all(probed[u] > n + 1 for u, n in others.items()))
            tasks = {t["name"]: t for t in (await s.status())["tasks"]}
            assert tasks.keys() == {"controller", *(f"health of {f.url}" for f in (*s.prefills, *s.decodes))}
            failed = tasks.pop(f"health of {bad[0]}")
            assert failed["restarts"] >= 1
            assert failed["error"] == "RuntimeError: not a URL that can be asked"
            assert all(t["alive"] and t["restarts"] == 0 for t in tasks.values())
            bad.clear()

    asyncio.run(run())


def test_the_controller_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_router_laps.pools.control import Control

    step = Control.step
    fails = iter([True])

    async def failing(self: Control) -> None:
        if next(fails, False):
            raise RuntimeError("no")
        await step(self)

    monkeypatch.setattr(Control, "step", failing)

    async def run() -> None:
        async with stack(2, config={"interval_s": 0.2}) as s:
            await s.until(lambda: len(s.lb.history.samples) >= 2, timeout=30)
            (task,) = [t for t in (await s.status())["tasks"] if t["name"] == "controller"]
            assert (task["alive"], task["restarts"]) == (True, 1)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rid", ["mine", ["mine", 'yo"urs']])
def test_a_further_try_has_an_id_of_its_own_and_the_client_sees_the_one_it_chose(stream: bool, rid: Any) -> None:
    """A server aborts what has the id of an attempt once more, seconds after that has ended."""

    async def run() -> None:
        async with stack(2, decodes=2) as s:
            texts = "a" if isinstance(rid, str) else ["a", "b"]
            s.decodes[0].status = s.decodes[1].status = 200
            failing = s.prefills[0] if s.lb.pools.instances[0].pool == "short" else s.prefills[1]
            failing.status = 503
            async with s.client.post(f"{s.url}/generate", json={"text": texts, "rid": rid, "stream": stream}) as r:
                reply = await r.read()
                assert r.status == 200, reply
            sent = [body["rid"] for f in (*s.prefills, *s.decodes) for body in f.bodies]
            assert rid in sent
            others = [x for x in sent if x != rid]
            assert others
            for other in others:
                for one in other if isinstance(other, list) else [other]:
                    assert one.encode() not in reply

    asyncio.run(run())
