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
from faults.oracle import RequestRecord

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_request_ids_are_unique_across_cases() -> None:
    named = re.findall(rb'"rid": ("[^"]*[a-z][^"]*")', b"\n".join(c.raw for c in CASES))
    assert len(named) == len(set(named)) > 1


def test_corpus_has_enough_cases_with_unique_names() -> None:
    assert len({c.name for c in CASES}) == len(CASES) >= 200
    assert len({c.raw for c in CASES}) >= 200
    assert sum("header" in c.name or "deadline" in c.name or "framing" in c.name for c in CASES) >= 50
    assert [c.name for c in corpus.CASES if c.promise] != []


def test_with_value_sets_value_at_path() -> None:
    body = corpus.with_value(corpus.BASES["/generate"], "sampling_params.custom_params.ttft_slo_ms", "5e-324")
    assert json.loads(body)["sampling_params"]["custom_params"] == {"ttft_slo_ms": 5e-324}
    body = corpus.with_value(corpus.BASES["/v1/chat/completions"], "messages.0.content", "12")
    assert json.loads(body)["messages"] == [{"role": "user", "content": 12}]
    body = corpus.with_value(corpus.BASES["/generate"], "input_ids", "NaN")
    assert "text" not in json.loads(body)


def test_marker_header_follows_request_line() -> None:
    assert (
        Case("x", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").wire({"a": "1"}) == b"GET / HTTP/1.1\r\na: 1\r\nhost: x\r\n\r\n"
    )
    blank = Case("x", b"\r\n\r\nGET / HTTP/1.1\r\n\r\n").wire({"a": "1"})
    assert blank == b"\r\n\r\nGET / HTTP/1.1\r\na: 1\r\n\r\n"
    assert Case("x", b"rubbish").wire({"a": "1"}) == b"rubbish"


def test_choice_of_cases_is_determined_by_seed() -> None:
    some = comparison.choose_cases(CASES, 50, 1)
    assert some == comparison.choose_cases(CASES, 50, 1) != comparison.choose_cases(CASES, 50, 2)
    assert len(some) == 50
    assert comparison.choose_cases(CASES, 10**6, 1) == list(CASES)


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
def test_replies_are_classified_by_family(raw: bytes, family: str, status: int | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    found = _sent_to(serve, CASES[0])
    assert (comparison.classify(found), found.status) == (family, status)


def test_silent_reply_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LIMIT_S", 0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    assert comparison.classify(_sent_to(serve, CASES[0])) == SILENCE


@pytest.mark.parametrize(
    ("second", "family"),
    [
        (b'data: {"text": "x"}\n\ndata: [DONE]\n\n', ANSWER),
        (b'data: {"error": {"message": "oh"}}\n\n', SOFT),
        (b'data: {"error": {"message": "Duplicate request ID detected: x"}}\n\n', SILENCE),
    ],
)
def test_request_is_resent_once_after_silence(second: bytes, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LIMIT_S", 1.5)
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

    assert comparison.classify(_sent_to(serve, CASES[0])) == family
    assert came == 2


def _sent_to(serve: Handler, case: Case) -> RequestRecord:
    async def run() -> RequestRecord:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return (await comparison.send_cases(port, [case], lambda _: None, lambda: True, marked=False))[case.name]

    return asyncio.run(run())


def outcome(family: str) -> RequestRecord:
    """Return a request with this outcome."""
    status = {REFUSAL: 400, ERROR: 500, GONE: None, SILENCE: None}.get(family, 200)
    reason = "" if family == ANSWER else "oh"
    return RequestRecord(
        comparison.FIRST_NUMBER, "compared", status=status, reason=reason, done=family == ANSWER, left=family == SILENCE
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
def test_outcome_must_match_or_improve_on_stock(ours: str, stock: str, fine: bool, better: bool) -> None:
    compared = comparison.Comparison(CASES[0], outcome(ours), outcome(stock))
    assert (compared.acceptable, compared.better) == (fine, better)


def test_promised_outcome_overrides_stock_outcome() -> None:
    case = Case("x", b"", promise=REFUSAL)
    assert comparison.Comparison(case, outcome(REFUSAL), outcome(ANSWER)).acceptable
    assert not comparison.Comparison(case, outcome(ANSWER), outcome(ANSWER)).acceptable


def test_error_without_server_evidence_is_attributed_to_router() -> None:
    evidence = Evidence()
    outcomes = {"a": outcome(ERROR), "b": outcome(ERROR), "c": outcome(REFUSAL)}
    outcomes["b"].number += 1
    evidence.note(comparison.FIRST_NUMBER, "p0", "answered 500")
    (own,) = comparison.find_own_errors(outcomes, evidence)
    assert own.startswith("b: error 500 oh")


def test_sending_stops_when_servers_die_and_reports_last_cases() -> None:
    cases, served = CASES[:30], 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply("200 OK", b"{}"))
        writer.close()

    async def run() -> dict[str, RequestRecord]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await comparison.send_cases(port, cases, lambda _: None, lambda: served < 10, marked=True)

    ours = asyncio.run(run())
    assert 10 <= len(ours) < 30
    assert comparison.last_sent(cases, ours) == list(ours)[-2 * comparison.MAX_CONCURRENT :]
    assert comparison.last_sent(cases[: len(ours)], ours) == []
    assert len(comparison.compare(cases, ours, {c.name: outcome(ANSWER) for c in cases[:4]})) == 4


def test_deadly_cases_must_be_refused_without_stock_outcome() -> None:
    deadly = [c for c in CASES if c.deadly]
    assert len(deadly) == 7
    refused = {c.name: outcome(REFUSAL) for c in deadly}
    answered = {c.name: outcome(ANSWER) for c in deadly}
    assert all(c.acceptable for c in comparison.compare(deadly, refused, {}))
    assert not any(c.acceptable for c in comparison.compare(deadly, answered, {}))
    assert len(comparison.compare(deadly, refused, {})) == 7
