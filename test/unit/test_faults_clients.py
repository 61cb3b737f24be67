"""Replies, good and bad, as read by both clients over real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from faults.clients import Bare, OpenAi, bounded
from faults.evidence import MARKER
from faults.oracle import Seen
from faults.prompts import CHAT, COMPLETIONS, GENERATE, Prompt

GEN = Prompt(GENERATE, {"input_ids": [3], "sampling_params": {}})
TALK = Prompt(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
TEXT = Prompt(COMPLETIONS, {"model": "m", "prompt": "x", "ignore_eos": True})


def whole(body: Any, status: str = "200 OK") -> bytes:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def streamed(*events: Any, end: bytes = b"data: [DONE]\n\n", last: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [b"data: " + json.dumps(e).encode() + b"\n\n" for e in events] + [end]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces if p) + last


def gen(ids: list[int], reason: str | None = None) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason} if reason else None}}


def chat(text: str, reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


ERROR = {"error": {"message": "lost", "type": "upstream_lost", "code": 502}}


def ask(
    client: type[Bare] | type[OpenAi], prompt: Prompt, stream: bool, reply: bytes, leave_s: float | None = None
) -> Any:
    """Serve ``reply`` to a request. Return the client's view, and the received request."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
        asked.extend((head, await reader.readexactly(length)))
        if reply:
            writer.write(reply)
        else:
            await reader.read()
        writer.close()

    async def run() -> Seen:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            seen = Seen(7, "plain", stream=stream)
            one = client(server.sockets[0].getsockname()[1])
            await bounded(one(prompt, seen, {"rid": "r"}), seen, leave_s)
            if isinstance(one, OpenAi):
                await one.close()
        return seen

    seen = asyncio.run(run())
    assert f"{MARKER}: 7".encode() in asked[0].lower()
    assert json.loads(asked[1])["rid"] == "r"
    return seen


@pytest.mark.parametrize(
    ("reply", "got", "done", "reason", "broken"),
    [
        (streamed(gen([1]), gen([1, 2], "length")), [1, 2], True, "length", False),
        (streamed(gen([1]), ERROR, end=b""), [1], False, "lost", False),
        (streamed(gen([1]), ERROR), [1], False, "lost", False),
        (streamed(gen([1]), ERROR, gen([1, 2])), [1], False, "lost", True),
        (streamed(gen([1], "length"), end=b"data: [DONE]\n\ndata: [DONE]\n\n"), [1], True, "length", True),
        (streamed(gen([1], "length"), end=b""), [1], False, "length", False),
        (streamed(gen([1]), end=b'data: {"outp'), [1], False, "", True),
        (streamed(gen([1]), last=b""), [1], False, "", True),
        (b"", None, False, "", False),
    ],
)
def test_streams_by_hand(reply: bytes, got: Any, done: bool, reason: str, broken: bool) -> None:
    seen = ask(Bare, GEN, True, reply, leave_s=None if reply else 0.05)
    assert (seen.got, seen.done, seen.reason, bool(seen.broken)) == (got, done, reason, broken)
    assert seen.left == (not reply)


def test_whole_replies_by_hand() -> None:
    seen = ask(Bare, GEN, False, whole(gen([4, 5], "length")))
    assert (seen.status, seen.got, seen.done) == (200, [4, 5], True)
    seen = ask(Bare, GEN, False, whole([gen([4], "length"), gen([5], "stop")]))
    assert (seen.got, seen.done) == ([[4], [5]], True)
    seen = ask(Bare, GEN, False, whole(ERROR, "502 Bad Gateway"))
    assert (seen.status, seen.reason, seen.done) == (502, "lost", False)
    seen = ask(Bare, GEN, False, whole({"detail": "no"}, "422 Unprocessable"))
    assert (seen.status, seen.reason) == (422, "no")
    seen = ask(Bare, GEN, False, whole({"output_ids": [1]})[:-4])
    assert (seen.status, bool(seen.broken)) == (None, True)


def test_the_openai_client() -> None:
    seen = ask(OpenAi, TALK, True, streamed(chat("a"), chat("b", "length")))
    assert (seen.status, seen.got, seen.done, seen.reason, seen.broken) == (200, "ab", True, "length", "")
    seen = ask(OpenAi, TALK, True, streamed(chat("a"), ERROR, end=b""))
    assert (seen.got, seen.done, "lost" in seen.reason) == ("a", False, True)
    seen = ask(OpenAi, TALK, True, streamed(chat("a"), end=b"", last=b""))
    assert (seen.got, seen.done, bool(seen.broken)) == ("a", False, True)
    seen = ask(OpenAi, TALK, True, whole(ERROR, "503 Unavailable"))
    assert (seen.status, seen.reason) == (503, "lost")
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": None}
    body = {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    seen = ask(OpenAi, TEXT, False, whole(body))
    assert (seen.status, seen.got, seen.done) == (200, "ab", True)
