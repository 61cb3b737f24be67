"""The corpus of hostile requests, how replies to them are read, and what counts as better."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from benchmark.faults import comparison, corpus
from benchmark.faults.corpus import ANSWER, CASES, ERROR, GONE, REFUSAL, SILENCE, SOFT, Case, Outcome
from benchmark.faults.evidence import Evidence

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_there_are_enough_and_each_has_a_name() -> None:
    assert len({c.name for c in CASES}) == len(CASES) >= 200
    assert len({c.raw for c in CASES}) >= 200
    assert sum("header" in c.name or "deadline" in c.name or "framing" in c.name for c in CASES) >= 50
    assert [c.name for c in corpus.CASES if c.promise] != []


def test_a_value_is_put_where_it_belongs() -> None:
    body = corpus.with_value(corpus.BASES["/generate"], "sampling_params.custom_params.ttft_slo_ms", "5e-324")
    assert json.loads(body)["sampling_params"]["custom_params"] == {"ttft_slo_ms": 5e-324}
    body = corpus.with_value(corpus.BASES["/v1/chat/completions"], "messages.0.content", "12")
    assert json.loads(body)["messages"] == [{"role": "user", "content": 12}]
    body = corpus.with_value(corpus.BASES["/generate"], "input_ids", "NaN")
    assert "text" not in json.loads(body)


def test_a_marker_goes_behind_the_request_line() -> None:
    assert (
        Case("x", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").wire({"a": "1"}) == b"GET / HTTP/1.1\r\na: 1\r\nhost: x\r\n\r\n"
    )
    assert Case("x", b"rubbish").wire({"a": "1"}) == b"rubbish"


def test_the_same_choice_for_the_same_seed() -> None:
    some = comparison.choose(CASES, 50, 1)
    assert some == comparison.choose(CASES, 50, 1) != comparison.choose(CASES, 50, 2)
    assert len(some) == 50
    assert comparison.choose(CASES, 10**6, 1) == list(CASES)


def reply(status: str, body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


EVENTS = "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    ("raw", "family", "status"),
    [
        (reply("200 OK", b'{"text": "x"}'), ANSWER, 200),
        (reply("200 OK", b'{"error": {"message": "no"}}'), SOFT, 200),
        (reply("400 Bad", b'{"error": {"message": "no"}}'), REFUSAL, 400),
        (reply("500 Oh", b"oh"), ERROR, 500),
        (reply("200 OK", b'data: {"text": "x"}\n\ndata: [DONE]\n\n', EVENTS), ANSWER, 200),
        (reply("200 OK", b'data: {"error": {"message": "no"}}\n\n', EVENTS), SOFT, 200),
        (reply("200 OK", b'data: {"text": "x"}', EVENTS), GONE, 200),
        (reply("200 OK", b"x" * 10)[:-3], GONE, 200),
        (b"", GONE, None),
        (b"what?\r\n\r\n", GONE, None),
    ],
)
def test_how_replies_are_read(raw: bytes, family: str, status: int | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    found = _sent_to(serve, CASES[0])
    assert (found.family, found.status) == (family, status)


def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LIMIT_S", 0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    assert _sent_to(serve, CASES[0]).family == SILENCE


def _sent_to(serve: Handler, case: Case) -> Outcome:
    async def run() -> Outcome:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await corpus.bounded(server.sockets[0].getsockname()[1], case)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("ours", "stock", "fine", "better"),
    [
        (REFUSAL, REFUSAL, True, False),
        (REFUSAL, ERROR, True, True),
        (ANSWER, SILENCE, True, True),
        (REFUSAL, SOFT, True, True),
        (REFUSAL, ANSWER, False, False),
        (ANSWER, REFUSAL, False, False),
        (ERROR, REFUSAL, False, False),
        (ERROR, ERROR, True, False),
        (SILENCE, GONE, False, False),
    ],
)
def test_the_same_or_better(ours: str, stock: str, fine: bool, better: bool) -> None:
    compared = comparison.Compared(CASES[0], Outcome(ours, 1), Outcome(stock, 2))
    assert (compared.fine, compared.better) == (fine, better)


def test_a_promise_goes_before_what_stock_does() -> None:
    case = Case("x", b"", promise=REFUSAL)
    assert comparison.Compared(case, Outcome(REFUSAL, 400), Outcome(ANSWER, 200)).fine
    assert not comparison.Compared(case, Outcome(ANSWER, 200), Outcome(ANSWER, 200)).fine


def test_an_error_is_the_routers_own_where_no_server_said_so() -> None:
    evidence = Evidence()
    outcomes: list[Any] = [Outcome(ERROR, 500, "oh"), Outcome(ERROR, 500, "oh"), Outcome(REFUSAL, 400, "no")]
    evidence.note(comparison.FIRST, "p0", "answered 500")
    (own,) = comparison.own_errors(CASES[:3], outcomes, evidence)
    assert own.startswith(CASES[1].name)


def test_sending_ends_with_the_servers_and_says_what_went_last() -> None:
    cases, served = CASES[:30], 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply("200 OK", b"{}"))
        writer.close()

    async def run() -> list[Outcome | None]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await comparison.run(port, cases, lambda _: None, lambda: served < 10, marked=True)

    ours = asyncio.run(run())
    sent = [c for c, o in zip(cases, ours, strict=True) if o]
    assert 10 <= len(sent) < 30
    assert comparison.last_sent(cases, ours) == [c.name for c in sent[-2 * comparison.TOGETHER :]]
    assert comparison.last_sent(cases[:5], ours[:5]) == []
    assert len(comparison.compare(cases, ours, {c.name: Outcome(ANSWER, 200) for c in cases[:4]})) == 4


def test_what_ends_a_server_is_promised_a_refusal_and_kept_from_stock() -> None:
    deadly = [c for c in CASES if c.deadly]
    assert {c.name for c in deadly} == corpus.DEADLY
    assert all(c.fine for c in comparison.compare(deadly, [Outcome(REFUSAL, 400)] * len(deadly), {}))
    assert not any(c.fine for c in comparison.compare(deadly, [Outcome(ANSWER, 200)] * len(deadly), {}))
