"""Unusual request bodies, which must be answered as by stock MiniLB, or better."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from sglang_router import mini_lb
from sglang_router.router_args import RouterArgs

from .fakes import Body, FakeDecode, FakePrefill, FakeServer, Stack, serving, stack

OWN = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid")
"""Members that a router adds."""
CUT = 599
"""Status that stands for an answer that broke off."""


class Reader(FakeServer):
    """Server that answers 200 to a body that is JSON and 400 to all others, as SGLang does."""

    bodies: list[Any]
    reply = b"{}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
            self.bodies.append(json.dumps({k: v for k, v in body.items() if k not in OWN}, sort_keys=True))
        except (ValueError, RecursionError):
            return web.json_response({"error": {"message": "unreadable"}}, status=400)
        if body.get("stream"):
            return web.Response(body=b"data: " + self.reply + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream")
        return web.Response(body=self.reply, content_type="application/json")


class ReadingPrefill(Reader, FakePrefill):
    """A prefill server without a device."""


class ReadingDecode(Reader, FakeDecode):
    """A decode server without a device."""


@contextlib.asynccontextmanager
async def stock_router(s: Stack) -> AsyncIterator[str]:
    """Run stock MiniLB in front of the same servers and yield its URL."""
    spec = importlib.util.spec_from_file_location("stock_mini_lb", mini_lb.__file__)
    assert spec
    assert spec.loader
    stock: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    args = RouterArgs(
        mini_lb=True,
        pd_disaggregation=True,
        prefill_urls=[(p.url, 8998) for p in s.prefills],
        decode_urls=[d.url for d in s.decodes],
    )
    stock.lb = stock.MiniLoadBalancer(args)
    async with serving(uvicorn.Config(stock.app, host="127.0.0.1", port=0, log_level="critical")) as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def reading_stack(**kwargs: Any) -> AsyncIterator[Stack]:
    async with stack(2, make_prefill=ReadingPrefill, make_decode=ReadingDecode, **kwargs) as s:
        yield s


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


CHAT = b'{"messages":[{"role":"user","content":"hello"}]%b}'
BODIES: list[tuple[str, bytes]] = [
    ("v1/chat/completions", b'{"messages":[{"role":"assistant","content":null,"tool_calls":[{"x":"\\ud800"}]}]}'),
    ("v1/chat/completions", CHAT % b',"tools":[{"x":"\\udfff"}]'),
    ("v1/chat/completions", CHAT % b',"tools":[NaN,123456789012345678901234567890]'),
    ("v1/chat/completions", CHAT % (b',"tools":' + nested(300))),
    ("v1/chat/completions", CHAT % (b',"tools":' + nested(1000))),
    ("v1/chat/completions", b'{"messages":[{"role":%b,"content":"a"}]}' % nested(1000)),
    ("v1/chat/completions", b'{"messages":[{"role":"user","content":%b}]}' % nested(1000)),
    ("v1/chat/completions", b'{"messages":"hello"}'),
    ("v1/chat/completions", b'{"messages":[5,null,{"content":5},{"content":[5,{"type":7,"text":7}]}]}'),
    ("v1/chat/completions", '{"messages":[{"role":"user","content":"schön"}]}'.encode("utf-16")),
    ("v1/completions", b'{"prompt":{"a":1}}'),
    ("v1/completions", b'{"prompt":[["a"],1,null]}'),
    ("v1/completions", b'{"prompt":%b}' % nested(800)),
    ("generate", '{"text":"schön"}'.encode("utf-16-le")),
    ("generate", '{"text":"schön"}'.encode("utf-16-be")),
    ("generate", '{"text":"schön"}'.encode("utf-32")),
    ("generate", '{"text":"schön"}'.encode("utf-8-sig")),
    ("generate", '{"text":"schön"}'.encode("latin-1")),
    ("generate", b'{"text":"a \xed\xa0\x80 b"}'),
    ("generate", b'{"text":"a \\ud800 b","rid":null}'),
    ("generate", b'{"text":"a","x":NaN,"big":123456789012345678901234567890,"bootstrap_room":7}'),
    ("generate", b'{"text":"a","x":[-Infinity,1e999,NaN],"rid":null}'),
    ("generate", b'{"text":"a","big":123456789012345678901234567890,"bootstrap_room":7}'),
    ("generate", b'{"text":"a","x":' + b"9" * 5000 + b"}"),
    ("generate", b'{"text":"a","x":' + nested(1000) + b"}"),
    ("generate", b'{"text":"a","x":' + nested(1000) + b',"rid":null}'),
    ("generate", b'{"text":"a","x":' + nested(100_000) + b"}"),
    ("generate", b'{"input_ids":[1,[2],3]}'),
    ("generate", b'{"input_ids":[' + b"1," * 100 + b"[2],3]}"),
    ("generate", b'{"input_ids":[[1],2]}'),
    ("generate", b'{"input_ids":[[1,[2]],[3]]}'),
    ("generate", b'{"input_ids":[' + b"1," * 100 + b'{"a":1}]}'),
    ("generate", b'{"input_ids":' + nested(1000) + b"}"),
    ("generate", b'{"input_ids":[1.5,2]}'),
    ("generate", b'{"input_ids":[]}'),
    ("generate", b'{"input_ids":7}'),
    ("generate", b'{"text":5}'),
    ("generate", b'{"text":{"a":1}}'),
    ("generate", b'{"text":[]}'),
    ("generate", b'{"text":"a","image_data":{"a":[1]},"audio_data":7}'),
    ("generate", b'{"text":"a","sampling_params":[null,5]}'),
    ("generate", b'{"text":"a","return_logprob":true,"stream":true}'),
    ("generate", b"{}"),
    ("generate", b"[1]"),
    ("generate", b"NaN"),
    ("generate", b'["\\ud800", NaN]'),
    ("generate", b'{"text":'),
    ("generate", b""),
    ("generate", b"\xff\xfe\x00"),
    ("generate", b"\x00" * 64),
]


async def send(
    s: Stack, url: str, route: str, raw: bytes, headers: dict[str, str] | None = None
) -> tuple[int, set[Any]]:
    """Send a request. Return (status, bodies that the servers received)."""
    servers = [*s.prefills, *s.decodes]
    for server in servers:
        server.bodies.clear()
    async with s.client.post(
        f"{url}/{route}", data=raw, headers={"content-type": "application/json", **(headers or {})}
    ) as response:
        status = response.status
        try:
            await response.read()
        except aiohttp.ClientPayloadError:
            status = CUT
        return status, {body for server in servers for body in server.bodies}


def test_unusual_bodies_get_answers_no_worse_than_stock_router(caplog: pytest.LogCaptureFixture) -> None:
    worse: list[Any] = []

    async def run() -> None:
        async with reading_stack() as s, stock_router(s) as stock:
            for route, raw in BODIES:
                theirs, seen_by_theirs = await send(s, stock, route, raw)
                ours, seen_by_ours = await send(s, s.url, route, raw)
                case = (route, raw[:60], theirs, ours)
                if theirs < 400 and not (ours == theirs and seen_by_ours == seen_by_theirs):
                    worse.append((*case, seen_by_theirs, seen_by_ours))
                if 400 <= theirs < 500 and ours not in (200, theirs):
                    worse.append(case)
                if ours >= 500:
                    worse.append(case)
            await s.at_rest()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert not worse
    # The stock router does not log, so these records are ours.
    assert not [r for r in caplog.records if r.exc_info and "stock_mini_lb" not in str(r.exc_info[1])]


@pytest.mark.parametrize(
    ("params", "sent"),
    [
        (b'{"temperature":NaN}', '{"custom_params": {"ttft_slo_ms": 250.0}, "temperature": NaN}'),
        (b'{"x":"\\ud800"}', '{"custom_params": {"ttft_slo_ms": 250.0}, "x": "\\ud800"}'),
        (b"[{},5]", '[{"custom_params": {"ttft_slo_ms": 250.0}}, 5]'),
        (b"7", "7"),
        (nested(1000), None),
    ],
)
def test_deadline_header_keeps_fields_with_unusual_sampling_params(params: bytes, sent: str | None) -> None:
    async def run() -> None:
        async with reading_stack() as s:
            raw = b'{"text":"a","big":123456789012345678901234567890,"sampling_params":%b}' % params
            status, seen = await send(s, s.url, "generate", raw, {"x-sgl-ttft-slo-ms": "250"})
            assert status == (400 if sent is None else 200)
            # As text: NaN does not equal itself.
            bodies = [(body["big"], json.dumps(body["sampling_params"])) for body in map(json.loads, seen)]
            assert bodies == ([] if sent is None else [(123456789012345678901234567890, sent)])
            await s.at_rest()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_logprob_reply_with_nan_is_merged(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with reading_stack() as s:
            monkeypatch.setattr(
                Reader, "reply", b'{"text":"x","index":0,"meta_info":{"x":NaN,"input_token_logprobs":[[NaN,1]]}}'
            )
            body = {"text": "a", "return_logprob": True, "stream": stream}
            async with s.client.post(f"{s.url}/generate", json=body) as response:
                assert response.status == 200
                text = await response.text()
            reply = json.loads(text.split("\n\n")[0].removeprefix("data: "))
            assert len(reply["meta_info"]["input_token_logprobs"]) == 2
            await s.at_rest()

    asyncio.run(run())


@pytest.mark.parametrize("reply", [b"nonsense", b'{"meta_info":{"input_token_logprobs":null}}', b"\xff", nested(1020)])
def test_unmergeable_logprob_reply_is_forwarded(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with reading_stack() as s:
            monkeypatch.setattr(Reader, "reply", reply)
            for stream in (False, True):
                body = {"text": "a", "return_logprob": True, "stream": stream}
                async with s.client.post(f"{s.url}/generate", json=body) as response:
                    assert response.status == 200
                    assert reply in await response.read()
            await s.at_rest()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("generate", {"text": "a", "sampling_params": {"n": 2}}),
        ("generate", {"text": ["a", "b"], "sampling_params": {"n": 2}, "stream": True}),
        ("generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}),
        ("v1/completions", {"prompt": "a", "n": 2}),
        ("v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
    ],
)
def test_request_for_several_samples_returns_400(route: str, body: Body) -> None:
    """A disaggregated pair would never answer such a request."""

    async def run() -> None:
        async with stack(2) as s:
            for p in s.prefills:
                p.gate.clear()
            status, reply = await asyncio.wait_for(s.post(route, **body), 120)
            assert status == 400
            assert "only one sample per prompt" in reply["error"]["message"]
            assert not any(server.bodies for server in (*s.prefills, *s.decodes))
            await s.at_rest()

    asyncio.run(run())


def test_header_bytes_are_forwarded_unchanged() -> None:
    values = {b"x-latin": b"caf\xe9", b"x-utf8": "café".encode(), b"x-odd": b"\xff\xfe\x80", b"x-plain": b"plain"}

    async def run() -> None:
        async with stack(2) as s:
            host, port = s.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = b'{"text":"a"}'
            lines = [b"POST /generate HTTP/1.1", b"host: x", b"connection: close", b"content-length: %d" % len(body)]
            lines += [b"content-type: application/json"]
            lines += [b"%b: %b" % item for item in values.items()]
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            for server in (s.pool("short")[0], s.decodes[0]):
                seen = {name: server.headers[0][name.decode()].encode("utf-8", "surrogateescape") for name in values}
                assert seen == values
                assert server.bodies[0]["text"] == "a"

    asyncio.run(run())


def test_body_without_json_content_type_returns_422() -> None:
    async def run() -> None:
        async with stack(2) as s, aiohttp.ClientSession() as client:
            for path in ("/generate", "/abort_request"):
                text = {"content-type": "text/plain"}
                async with client.post(s.url + path, data=b'{"text":"a"}', headers=text) as r:
                    assert r.status == 422
                    assert "application/json" in (await r.json())["error"]["message"]
            assert not s.decodes[0].bodies

    asyncio.run(run())


def test_repeated_deadline_header_returns_400() -> None:
    async def run() -> None:
        async with stack(2) as s:
            headers = [("x-sgl-ttft-slo-ms", "250"), ("x-sgl-ttft-slo-ms", "1")]
            async with s.client.post(f"{s.url}/generate", json={"text": "a"}, headers=headers) as response:
                assert response.status == 400
                assert "x-sgl-ttft-slo-ms: given 2 times" in (await response.json())["error"]["message"]
            assert not any(server.bodies for server in (*s.prefills, *s.decodes))
            await s.at_rest()

    asyncio.run(run())
