"""Replies, good and bad, as read by both clients over real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from faults.clients import BareClient, OpenAiClient, run_with_limit
from faults.evidence import MARKER
from faults.oracle import RequestRecord
from faults.prompts import CHAT, COMPLETIONS, GENERATE, Prompt

GEN = Prompt(GENERATE, {"input_ids": [3], "sampling_params": {}})
TALK = Prompt(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
TEXT = Prompt(COMPLETIONS, {"model": "m", "prompt": "x", "ignore_eos": True})


def whole_reply(body: Any, status: str = "200 OK") -> bytes:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def streamed_reply(*events: Any, end: bytes = b"data: [DONE]\n\n", last: bytes = b"0\r\n\r\n") -> bytes:
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
    client: type[BareClient] | type[OpenAiClient],
    prompt: Prompt,
    stream: bool,
    reply: bytes,
    leave_s: float | None = None,
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

    async def run() -> RequestRecord:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            record = RequestRecord(7, "plain", stream=stream)
            one = client(server.sockets[0].getsockname()[1])
            await run_with_limit(one(prompt, record, {"rid": "r"}), record, leave_s)
            if isinstance(one, OpenAiClient):
                await one.close()
        return record

    record = asyncio.run(run())
    assert f"{MARKER}: 7".encode() in asked[0].lower()
    assert json.loads(asked[1])["rid"] == "r"
    return record


@pytest.mark.parametrize(
    ("reply", "got", "done", "reason", "broken"),
    [
        (streamed_reply(gen([1]), gen([1, 2], "length")), [1, 2], True, "length", False),
        (streamed_reply(gen([1]), ERROR, end=b""), [1], False, "lost", False),
        (streamed_reply(gen([1]), ERROR), [1], False, "lost", False),
        (streamed_reply(gen([1]), ERROR, gen([1, 2])), [1], False, "lost", True),
        (streamed_reply(gen([1], "length"), end=b"data: [DONE]\n\ndata: [DONE]\n\n"), [1], True, "length", True),
        (streamed_reply(gen([1], "length"), end=b""), [1], False, "length", False),
        (streamed_reply(gen([1]), end=b'data: {"outp'), [1], False, "", True),
        (streamed_reply(gen([1]), last=b""), [1], False, "", True),
        (b"", None, False, "", False),
    ],
)
def test_bare_client_reads_streamed_replies(reply: bytes, got: Any, done: bool, reason: str, broken: bool) -> None:
    record = ask(BareClient, GEN, True, reply, leave_s=None if reply else 2.0)
    assert (record.answer, record.done, record.reason, bool(record.broken)) == (got, done, reason, broken)
    assert record.left == (not reply)


def test_bare_client_reads_whole_replies() -> None:
    record = ask(BareClient, GEN, False, whole_reply(gen([4, 5], "length")))
    assert (record.status, record.answer, record.done) == (200, [4, 5], True)
    record = ask(BareClient, GEN, False, whole_reply([gen([4], "length"), gen([5], "stop")]))
    assert (record.answer, record.done) == ([[4], [5]], True)
    record = ask(BareClient, GEN, False, whole_reply(ERROR, "502 Bad Gateway"))
    assert (record.status, record.reason, record.done) == (502, "lost", False)
    record = ask(BareClient, GEN, False, whole_reply({"detail": "no"}, "422 Unprocessable"))
    assert (record.status, record.reason) == (422, "no")
    record = ask(BareClient, GEN, False, whole_reply({"output_ids": [1]})[:-4])
    assert (record.status, bool(record.broken)) == (None, True)


def test_openai_client_reads_replies_and_errors() -> None:
    record = ask(OpenAiClient, TALK, True, streamed_reply(chat("a"), chat("b", "length")))
    assert (record.status, record.answer, record.done, record.reason, record.broken) == (200, "ab", True, "length", "")
    record = ask(OpenAiClient, TALK, True, streamed_reply(chat("a"), ERROR, end=b""))
    assert (record.answer, record.done, "lost" in record.reason) == ("a", False, True)
    record = ask(OpenAiClient, TALK, True, streamed_reply(chat("a"), end=b"", last=b""))
    assert (record.answer, record.done, bool(record.broken)) == ("a", False, True)
    record = ask(OpenAiClient, TALK, True, whole_reply(ERROR, "503 Unavailable"))
    assert (record.status, record.reason) == (503, "lost")
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": None}
    body = {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    record = ask(OpenAiClient, TEXT, False, whole_reply(body))
    assert (record.status, record.answer, record.done) == (200, "ab", True)
