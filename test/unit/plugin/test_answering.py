"""Receipts in the HTTP server: completed once with the time outside the scheduler, and in a header on request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core.receipts.receipt import META_KEY, RECEIPT_HEADER
from sglang_laps.http import answering
from sglang_laps.http.answering import HeaderReceipt, Outside, OutsideTimes, ReceiptHeader

ASKS = (RECEIPT_HEADER.encode(), b"1")


def receipt(rid: str = "a", ms: float = 2.0) -> dict[str, Any]:
    return {"rid": rid, "arrived_s": 100.0, "ttft_ms": ms, "causes": {"computing": ms}, "behind": []}


async def answers(state: Any, events: int) -> list[dict[str, Any]]:
    """Return a request's answers as sent to the client; the scheduler's first answer has a receipt."""

    async def stock(*_: Any, **__: Any) -> AsyncIterator[Any]:
        for i in range(events):
            info = {META_KEY: [[(json.dumps(receipt()).encode(), True)]]} if i == 0 else {"other": [[i]]}
            meta: dict[str, Any] = {}
            assert META_KEY not in answering._keep_receipt(lambda *a: a[3], None, meta, state, info, 0, None)
            yield {"meta_info": meta}

    return [out async for out in answering._deliver_receipt(stock, None, None, state)]


def make_state(created_s: float | None = None) -> Any:
    created = time.perf_counter() - 0.01 if created_s is None else created_s
    return SimpleNamespace(time_stats=SimpleNamespace(created_time=created))


def test_receipt_is_sent_once_and_includes_time_until_answer() -> None:
    first, *others = asyncio.run(answers(make_state(), 3))
    found = first["meta_info"][META_KEY]
    assert found["causes"]["computing"] == 2.0
    assert found["ttft_ms"] == round(sum(found["causes"].values()), 3) >= 10.0
    assert all(META_KEY not in out["meta_info"] for out in others)


def test_unknown_creation_time_adds_nothing_to_receipt() -> None:
    (only,) = asyncio.run(answers(make_state(0.0), 1))
    assert only["meta_info"][META_KEY] == receipt()


@pytest.mark.parametrize("asks", [True, False])
def test_receipt_header_is_sent_only_on_request(asks: bool) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert bool(sent) is not asks  # the answer is held until the first token
        state = make_state(time.perf_counter())
        await asyncio.gather(*(asyncio.create_task(answers(state, 1)) for _ in range(1)))
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [ASKS] if asks else []}
    asyncio.run(ReceiptHeader(app)(scope, None, send))  # type: ignore[arg-type]
    assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
    found = dict(sent[0]["headers"])
    assert (ASKS[0] in found) is asks
    if asks:
        told = json.loads(found[ASKS[0]])
        assert told["ttft_ms"] == round(sum(told["causes"].values()), 3)


def test_long_receipt_header_leaves_out_other_ids() -> None:
    others = [{"rid": "\N{GRINNING FACE}" * 128, "tokens": 9, "ms": 1.0}] * 8
    long = {**receipt(), "behind": others, "left_out": 3}
    text = HeaderReceipt(long, False).as_header()
    assert len(text) <= answering.LONGEST_HEADER
    told = json.loads(text)
    assert (told["rid"], told["behind"], told["left_out"]) == ("a", [], 11)
    assert json.loads(HeaderReceipt({**long, "behind": others[:1]}, False).as_header())["left_out"] == 3


def test_outside_times_drop_oldest_entry_when_full() -> None:
    kept = OutsideTimes(2)
    for rid in ("a", "b", "c"):
        kept.add(rid, Outside(1000, 2000))
    assert kept.complete(receipt("a")) == receipt("a")
    assert kept.complete(receipt("c"))["causes"] == {"computing": 2.0, "tokenizing": 1.0, "answering": 2.0}


def test_span_attributes_include_receipt_causes() -> None:
    state = make_state()
    assert answering._attributes({"a": 1}, None, state) == {"a": 1}
    state.laps_receipt = receipt()
    assert answering._attributes({}, None, state) == {"laps.causes_ms.computing": 2.0, "laps.behind": []}
