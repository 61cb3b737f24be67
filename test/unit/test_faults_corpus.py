"""Corpus of hostile requests: cases, reading of replies, and comparison of outcomes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable

import pytest
from faults import comparison, corpus
from faults.corpus import ANSWER, CASES, ERROR, GONE, REFUSAL, SILENCE, SOFT, Case
from faults.evidence import Evidence
from faults.oracle import Seen

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_no_two_cases_have_one_id_for_they_may_be_under_way_together() -> None:
    named = re.findall(rb'"rid": ("[^"]*[a-z][^"]*")', b"\n".join(c.raw for c in CASES))
    assert len(named) == len(set(named)) > 1


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
    blank = Case("x", b"\r\n\r\nGET / HTTP/1.1\r\n\r\n").wire({"a": "1"})
    assert blank == b"\r\n\r\nGET / HTTP/1.1\r\na: 1\r\n\r\n"
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
        (reply("200 OK", b"x" * 10)[:-3], GONE, None),
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
    assert (comparison.family(found), found.status) == (family, status)


def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LIMIT_S", 0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    assert comparison.family(_sent_to(serve, CASES[0])) == SILENCE


@pytest.mark.parametrize(
    ("second", "family"),
    [
        (b'data: {"text": "x"}\n\ndata: [DONE]\n\n', ANSWER),
        (b'data: {"error": {"message": "oh"}}\n\n', SOFT),
        (b'data: {"error": {"message": "Duplicate request ID detected: x"}}\n\n', SILENCE),
    ],
)
def test_what_is_met_with_silence_once_is_sent_again(
    second: bytes, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "LIMIT_S", 0.2)
    came = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        if came == 1:
            await reader.read()
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply("200 OK", second, EVENTS))
        writer.close()

    assert comparison.family(_sent_to(serve, CASES[0])) == family
    assert came == 2


def _sent_to(serve: Handler, case: Case) -> Seen:
    async def run() -> Seen:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return (await comparison.run(port, [case], lambda _: None, lambda: True, marked=False))[case.name]

    return asyncio.run(run())


def outcome(family: str) -> Seen:
    """Return a request with this outcome."""
    status = {REFUSAL: 400, ERROR: 500, GONE: None, SILENCE: None}.get(family, 200)
    reason = "" if family == ANSWER else "oh"
    return Seen(
        comparison.FIRST, "compared", status=status, reason=reason, done=family == ANSWER, left=family == SILENCE
    )


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
    compared = comparison.Compared(CASES[0], outcome(ours), outcome(stock))
    assert (compared.fine, compared.better) == (fine, better)


def test_a_promise_goes_before_what_stock_does() -> None:
    case = Case("x", b"", promise=REFUSAL)
    assert comparison.Compared(case, outcome(REFUSAL), outcome(ANSWER)).fine
    assert not comparison.Compared(case, outcome(ANSWER), outcome(ANSWER)).fine


def test_an_error_is_the_routers_own_where_no_server_said_so() -> None:
    evidence = Evidence()
    outcomes = {"a": outcome(ERROR), "b": outcome(ERROR), "c": outcome(REFUSAL)}
    outcomes["b"].number += 1
    evidence.note(comparison.FIRST, "p0", "answered 500")
    (own,) = comparison.own_errors(outcomes, evidence)
    assert own.startswith("b: error 500 oh")


def test_sending_ends_with_the_servers_and_says_what_went_last() -> None:
    cases, served = CASES[:30], 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply("200 OK", b"{}"))
        writer.close()

    async def run() -> dict[str, Seen]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await comparison.run(port, cases, lambda _: None, lambda: served < 10, marked=True)

    ours = asyncio.run(run())
    assert 10 <= len(ours) < 30
    assert comparison.last_sent(cases, ours) == list(ours)[-2 * comparison.TOGETHER :]
    assert comparison.last_sent(cases[: len(ours)], ours) == []
    assert len(comparison.compare(cases, ours, {c.name: outcome(ANSWER) for c in cases[:4]})) == 4


def test_what_ends_a_server_is_promised_a_refusal_and_kept_from_stock() -> None:
    deadly = [c for c in CASES if c.deadly]
    assert len(deadly) == 7
    refused = {c.name: outcome(REFUSAL) for c in deadly}
    answered = {c.name: outcome(ANSWER) for c in deadly}
    assert all(c.fine for c in comparison.compare(deadly, refused, {}))
    assert not any(c.fine for c in comparison.compare(deadly, answered, {}))
    assert len(comparison.compare(deadly, refused, {})) == 7
