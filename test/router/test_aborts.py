"""Aborts: which requests end, under which id, and which requests must not end."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from sglang_router_laps.request.ids import hashed
from sglang_router_laps.servers import aborts

from .fakes import SHORT, Body, FakeDecode, FakePrefill, FakeServer, Stack, World, stack


class Strict(FakeServer):
    """Server that treats ids as SGLang does: it refuses an id in use, and an abort ends all requests whose ids start
    with the given id. It can require a key for aborts."""

    def __init__(self, world: World, *args: Any, **kwargs: Any) -> None:
        super().__init__(world, *args, **kwargs)
        self.running_ids: dict[str, asyncio.Task[Any]] = {}
        self.admin_key: str | None = None
        self.refused = 0

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        rid = body["rid"]
        if rid in self.running_ids:
            return web.json_response({"error": {"message": f"Duplicate request ID detected: {rid}"}}, status=400)
        task = asyncio.current_task()
        assert task
        self.running_ids[rid] = task
        try:
            return await super().serve(request, body)
        except asyncio.CancelledError:
            if not any(rid.startswith(a) or a == "*" for a in self.aborted):
                raise
            reason = {"type": "abort", "message": "Aborted", "status_code": None}
            return web.json_response({"text": "", "meta_info": {"id": rid, "finish_reason": reason}})
        finally:
            del self.running_ids[rid]

    async def _abort(self, request: web.Request) -> web.Response:
        if self.admin_key and request.headers.get("authorization") != f"Bearer {self.admin_key}":
            self.refused += 1
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        self.aborted.append("*" if body.get("abort_all") else body["rid"])
        for rid, task in self.running_ids.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                task.cancel()
        return web.Response()


class StrictPrefill(Strict, FakePrefill):
    pass


class StrictDecode(Strict, FakeDecode):
    pass


def strict(prefills: int = 2, decodes: int = 1, **more: Any) -> Any:
    pause_s = more.pop("pause_s", 0.0)
    return stack(
        prefills,
        decodes,
        make_prefill=StrictPrefill,
        make_decode=lambda w: StrictDecode(w, chunks=3, pause_s=pause_s),
        **more,
    )


async def leave(s: Stack, headers: dict[str, str] | None = None, route: str = "generate", **body: Any) -> None:
    """Send a request and disconnect while its prefill runs."""
    for p in s.prefills:
        p.gate.clear()
    before = sum(len(p.bodies) for p in s.prefills)
    async with aiohttp.ClientSession() as client:
        task = asyncio.create_task(client.post(f"{s.url}/{route}", json=body, headers=headers))
        await s.until(lambda: sum(len(p.bodies) for p in s.prefills) > before and s.decodes[0].running > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await s.at_rest()
    for p in s.prefills:
        p.gate.set()


def test_duplicate_rid_is_refused_without_aborting_first_request() -> None:
    async def run() -> None:
        async with strict() as s:
            gate = s.pool("short")[0].gate
            gate.clear()
            first = asyncio.create_task(s.post(text=SHORT, rid="mine"))
            await s.until(lambda: hashed("mine") in s.decodes[0].running_ids)
            status, reply = await s.post(text=SHORT, rid="mine")
            assert status == 400
            assert "'mine' is under way" in reply["error"]["message"]
            gate.set()
            assert (await first)[0] == 200
            await s.at_rest()
            assert not any(f.aborted for f in (*s.prefills, *s.decodes))

    asyncio.run(run())


def test_late_abort_of_ended_request_does_not_end_next_request_with_its_rid(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with strict() as s:
            decode, gate = s.decodes[0], s.pool("short")[0].gate
            for text in ("first", "second"):
                assert (await s.post(text=SHORT, rid="mine"))[1]["text"]
                assert [b["rid"] == hashed("mine") for b in decode.bodies] == [True, False][: len(decode.bodies)], text
                await s.at_rest()
            gate.clear()
            third = asyncio.create_task(s.post(text=SHORT, rid="mine"))
            await s.until(lambda: len(decode.running_ids) == 1)
            # SGLang aborts an id once more two seconds after its stream has ended.
            async with s.client.post(f"{decode.url}/abort_request", json={"rid": hashed("mine")}) as r:
                assert r.status == 200
            gate.set()
            status, reply = await third
            assert (status, reply["text"]) == (200, "t2")
            monkeypatch.setattr(aborts, "USED_S", 0.0)
            await s.at_rest()
            assert (await s.post(text=SHORT, rid="mine"))[0] == 200
            assert decode.bodies[-1]["rid"] == hashed("mine")
            assert list(s.lb.aborter._ended) == ["mine"]

    asyncio.run(run())


def test_refused_request_is_aborted_only_at_accepting_server() -> None:
    async def run() -> None:
        async with strict() as s:
            short, long = s.pool("short")[0], s.pool("long")[0]
            short.gate.clear()
            long.gate.clear()
            # Another router's request: of a second request with its id, one leg runs and one is refused.
            first = asyncio.create_task(
                s.client.post(f"{s.decodes[0].url}/generate", json={"rid": hashed("mine"), "bootstrap_room": 1})
            )
            await s.until(lambda: hashed("mine") in s.decodes[0].running_ids)
            status, reply = await s.post(text="b" * 8000, rid="mine")
            assert (status, reply["error"]["message"]) == (400, "Duplicate request ID detected: mine")
            await s.until(lambda: len(long.aborted) == 1)
            assert (short.aborted, long.aborted, s.decodes[0].aborted) == ([], [f"{hashed('mine')}.prefill"], [])
            first.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("route", "body", "n"),
    [
        ("generate", {"text": SHORT, "rid": "r"}, 1),
        ("generate", {"text": [SHORT, SHORT], "rid": "r"}, 2),
        ("generate", {"text": [SHORT, SHORT], "rid": ["x", "y"]}, 2),
        ("v1/completions", {"prompt": [SHORT, SHORT, SHORT], "rid": "r"}, 3),
        ("v1/completions", {"prompt": [[1, 2], [3]], "rid": "r"}, 2),
        ("v1/completions", {"prompt": [1, 2, 3], "rid": "r"}, 1),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": SHORT}], "rid": "r"}, 1),
    ],
)
def test_abort_uses_rids_sent_to_servers(route: str, body: Body, n: int) -> None:
    async def run() -> None:
        async with stack(2) as s:
            await leave(s, route=route, **body)
            prefill = next(p for p in s.prefills if p.bodies)
            both: tuple[FakeServer, ...] = (prefill, s.decodes[0])
            for server in both:
                await s.until(partial(lambda f: len(f.aborted) == n, server))
                sent = server.bodies[0]["rid"]
                assert server.aborted == (sent if isinstance(sent, list) else [sent])

    asyncio.run(run())


def test_router_api_key_authorizes_abort_after_disconnect() -> None:
    async def run() -> None:
        async with strict(args={"api_key": "admin"}) as s:
            for f in (*s.prefills, *s.decodes):
                f.admin_key = "admin"
            await leave(s, {"Authorization": "Bearer client"}, text=SHORT, rid="r")
            await s.until(lambda: s.decodes[0].aborted == [hashed("r", "Bearer client")])

    asyncio.run(run())


def test_refused_abort_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with strict() as s:
            s.decodes[0].admin_key = "admin"
            for i in range(3):
                await leave(s, {"Authorization": "Bearer client"}, text=SHORT, rid=f"r{i}")
                await s.until(lambda i=i: s.decodes[0].refused == i + 1)
            said = [r for r in caplog.records if r.levelno >= logging.WARNING and "abort" in r.getMessage()]
            assert len(said) == 1
            assert s.decodes[0].url in said[0].getMessage()
            assert "--api-key" in said[0].getMessage()

    asyncio.run(run())


async def ask_abort(s: Stack, body: Any, **more: Any) -> tuple[int, bytes]:
    async with s.client.post(f"{s.url}/abort_request", json=body, **more) as r:
        return r.status, await r.read()


def done(server: FakeServer) -> list[str]:
    """Return the aborted ids without the probes that only check the right to abort."""
    names = [r for b in server.bodies for r in (b["rid"] if isinstance(b["rid"], list) else [b["rid"]])]
    return [a for a in server.aborted if a in names]


def test_router_abort_ends_only_named_request() -> None:
    async def run() -> None:
        async with strict(3, 2) as s:
            for p in s.prefills:
                p.gate.clear()
            held = asyncio.create_task(s.post(text=SHORT, rid="mine"))
            other = asyncio.create_task(s.post(text=SHORT, rid="other"))
            await s.until(lambda: sum(len(f.running_ids) for f in (*s.prefills, *s.decodes)) == 4)
            mine = hashed("mine")
            has = {f.url: [r for r in f.running_ids if r.startswith(mine)] for f in (*s.prefills, *s.decodes)}
            assert sorted(r for ids in has.values() for r in ids) == [mine, f"{mine}.prefill"]
            assert await ask_abort(s, {"rid": "mine"}) == (200, b"")
            assert {f.url: done(f) for f in (*s.prefills, *s.decodes)} == has
            async with asyncio.timeout(120):
                status, reply = await held
            # The reply comes from the decode server, as from a single server.
            assert (status, reply["meta_info"]["finish_reason"]["type"]) == (200, "abort")
            assert reply["meta_info"]["id"] == "mine"
            for p in s.prefills:
                p.gate.set()
            assert (await other)[0] == 200

    asyncio.run(run())


def test_batch_or_single_prompt_is_aborted_by_client_rid() -> None:
    async def run() -> None:
        async with stack(2) as s:
            for p in s.prefills:
                p.gate.clear()
            held = asyncio.create_task(s.post("v1/completions", prompt=[SHORT, SHORT], rid="mine"))
            await s.until(lambda: s.decodes[0].running > 0 and any(p.running for p in s.prefills))
            assert (await ask_abort(s, {"rid": "mine"}))[0] == 200
            both = [f for f in (*s.prefills, *s.decodes) if f.bodies]
            assert [done(f) for f in both] == [f.bodies[0]["rid"] for f in both]
            # Abort one prompt of the batch only.
            assert (await ask_abort(s, {"rid": "mine_1"}))[0] == 200
            assert [done(f)[2:] for f in both] == [f.bodies[0]["rid"][1:] for f in both]
            for p in s.prefills:
                p.gate.set()
            await held

    asyncio.run(run())


def test_abort_of_unknown_rid_or_all_reaches_every_server() -> None:
    """Another router may have the request, under the id that is derived from the client's id."""

    async def run() -> None:
        async with strict(2, 2, args={"api_key": "admin"}) as s:
            headers = {"Authorization": "Bearer admin"}
            for body in ({"rid": "elsewhere"}, {"abort_all": True}, {"rid": ""}):
                assert (await ask_abort(s, body, headers=headers))[0] == 200
            there = hashed("elsewhere", "Bearer admin")
            assert [f.aborted for f in s.prefills] == [[f"{there}.prefill", "*"]] * 2
            assert [f.aborted for f in s.decodes] == [[there, "*"]] * 2

    asyncio.run(run())


def test_abort_all_without_client_key_returns_servers_401() -> None:
    async def run() -> None:
        async with strict(args={"api_key": "admin"}) as s:
            for f in (*s.prefills, *s.decodes):
                f.admin_key = "admin"
            assert await ask_abort(s, {"abort_all": True}) == (401, b'{"error": "Unauthorized"}')
            assert not any(f.aborted for f in (*s.prefills, *s.decodes))
            headers = {"Authorization": "Bearer admin"}
            assert (await ask_abort(s, {"abort_all": True}, headers=headers))[0] == 200
            assert all(f.aborted == ["*"] for f in (*s.prefills, *s.decodes))

    asyncio.run(run())


@pytest.mark.parametrize("body", [[], "x", {"rid": 7}, {"abort_all": "yes"}, {"rid": ["a"]}])
def test_invalid_abort_body_returns_400(body: Any) -> None:
    async def run() -> None:
        async with strict() as s:
            assert (await ask_abort(s, body))[0] == 400
            assert not any(f.aborted for f in (*s.prefills, *s.decodes))

    asyncio.run(run())
