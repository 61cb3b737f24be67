"""Actions of clients over real sockets: a good router passes, and errors of a bad router are detected."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from faults import actions, wire
from faults.actions import Clients
from faults.evidence import Evidence
from faults.fleet import KEY
from faults.oracle import CUT, HUNG, LOST, REFUSED, RIGHT, WRONG, Oracle
from faults.prompts import GENERATE, Prompt
from faults.schedule import Action

PROMPTS = [Prompt(GENERATE, {"input_ids": [3], "sampling_params": {"max_new_tokens": 2}})]
ANSWERS = [[0, 1]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Writer = asyncio.StreamWriter


class Router:
    """Fake router that answers with the numbers 0, 1, ... as tokens, up to the requested length."""

    def __init__(self) -> None:
        self.aborts: list[tuple[dict[str, Any], bool]] = []
        """Received aborts: (body, True if the key was sent)."""
        self.under_way: set[str] = set()
        self.pad = "x" * 2000
        self.drained: Callable[[Writer], Awaitable[None]] = lambda writer: writer.drain()
        self.stays = 0.0
        """Time for which a request outlives its client (seconds)."""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            line, _, headers = head.decode().partition("\r\n")
            length = next(x.partition(":")[2] for x in headers.split("\r\n") if x.startswith("content-length"))
            body = json.loads(await reader.readexactly(int(length)))
            if "/abort_request" in line:
                keyed = f"Bearer {KEY}" in headers
                self.aborts.append((body, keyed))
                writer.write(whole_reply(*((200, {}) if keyed else (401, {"error": "no key"}))))
            elif body.get("rid") in self.under_way:
                writer.write(whole_reply(400, {"error": {"message": "under way"}}))
            elif body.get("stream"):
                await self.stream(body, reader, writer)
            else:
                most = body.get("sampling_params", {}).get("max_new_tokens", 1)
                writer.write(whole_reply(200, gen(most, most)))
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            writer.close()

    async def stream(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: Writer) -> None:
        rid = body.get("rid", "")
        self.under_way.add(rid)
        try:
            writer.write(HEAD)
            most = body["sampling_params"]["max_new_tokens"] if "sampling_params" in body else 10**9
            for n in range(1, most + 1):
                event = b"data: " + json.dumps({**gen(n, most), "pad": self.pad}).encode() + b"\n\n"
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await self.drained(writer)
                await asyncio.sleep(0 if "sampling_params" in body else 0.01)
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        finally:
            await asyncio.sleep(self.stays)
            self.under_way.discard(rid)


def gen(n: int, most: int) -> dict[str, Any]:
    return {"output_ids": list(range(n)), "meta_info": {"finish_reason": {"type": "length"} if n == most else None}}


def whole_reply(status: int, body: Any) -> bytes:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def ends(kind: str, router: Router, times: int = 1) -> dict[str, dict[str, int]]:
    """Run actions of this kind and return the ends of their requests, by action."""

    async def run() -> Oracle:
        server = await asyncio.start_server(router.serve, "127.0.0.1", 0)
        async with server:
            router.port = server.sockets[0].getsockname()[1]
            oracle = Oracle(Evidence(), {"prefill": ["p0"], "decode": ["d0"]})
            clients = Clients([router.port], PROMPTS, ANSWERS, oracle, itertools.count(1))
            some = (Action(kind, 0, True, False, seed) for seed in range(times))
            await asyncio.gather(*map(clients.do, some))
            await clients.finish()
        return oracle

    return {action: dict(c) for action, c in asyncio.run(run()).by_action.items()}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "PAUSE_S", (0.05, 0.1))
    monkeypatch.setattr(actions, "UNREAD_S", 3.0)
    monkeypatch.setattr(actions, "LIMIT_S", 2.0)
    monkeypatch.setattr(actions, "DISCONNECT_LIMIT_S", 2.0)


def test_pausing_reader_is_served_and_nonreader_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actions, "UNREAD_S", 15.0)
    router = Router()

    async def drained(writer: Writer) -> None:
        await asyncio.wait_for(writer.drain(), 5.0)

    router.drained = drained
    found = ends("stall", router, 8)["stall"]
    assert found[CUT] == actions.MAX_UNREAD
    assert found == {RIGHT: 8 - actions.MAX_UNREAD, CUT: actions.MAX_UNREAD}


def test_slot_held_for_nonreading_client_is_detected() -> None:
    found = ends("stall", Router(), 8)["stall"]
    assert found == {RIGHT: 8 - actions.MAX_UNREAD, HUNG: actions.MAX_UNREAD}


def test_stalled_reader_blocks_sender() -> None:
    """Otherwise a stalled reader would not burden any router."""
    blocked, sent = asyncio.Event(), 0

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        try:
            while True:
                writer.write(b"3e8\r\n" + 1000 * b"x" + b"\r\n")
                sent += 1000
                await asyncio.wait_for(writer.drain(), 0.5)
        except TimeoutError:
            blocked.set()
            writer.transport.abort()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        raw = wire.request("/x", b"")
        async with server, wire.exchange(server.sockets[0].getsockname()[1], raw, slow=True):
            await asyncio.wait_for(blocked.wait(), 120)

    asyncio.run(run())
    # Size of an SGLang event: 400 bytes, plus id and text of each token so far.
    assert sent < 0.5 * sum(400 + 10 * n for n in range(actions.STALL_TOKENS))


@pytest.mark.parametrize(("stays", "end"), [(0.0, RIGHT), (20.0, WRONG)])
def test_request_outliving_its_client_is_detected(stays: float, end: str) -> None:
    router = Router()
    router.stays, router.pad = stays, ""
    found = ends("pipeline", router, 6)["pipeline"]
    left = found[CUT]
    assert found[end] - (6 - left if end == RIGHT else 0) == left > 0
    assert sum(found.values()) == 6 + left


def test_closing_pipelined_connection_does_not_count_as_loss() -> None:
    router = Router()

    async def refuse(writer: Writer) -> None:
        raise OSError

    router.drained = refuse
    found = ends("pipeline", router, 6)["pipeline"]
    assert found[CUT] == 6
    assert not {WRONG, HUNG, LOST} & found.keys()


def test_only_owners_send_key_with_abort() -> None:
    router = Router()
    found = ends("keyless", router, 12)
    assert found["keyless abort"] == {REFUSED: len(router.aborts)}
    assert not any(keyed for _, keyed in router.aborts)
    assert any(body.get("abort_all") for body, _ in router.aborts)
    assert {*found["keyless"]} <= {RIGHT, CUT, REFUSED}
    router = Router()
    assert ends("abort", router, 3)["abort route"] == {RIGHT: 3}
    assert all(keyed for _, keyed in router.aborts)
