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
from sglang_laps import answering
from sglang_laps.answering import Outside, OutsideTimes, ReceiptHeader

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


def fresh(created_s: float | None = None) -> Any:
    created = time.perf_counter() - 0.01 if created_s is None else created_s
    return SimpleNamespace(time_stats=SimpleNamespace(created_time=created))


def test_a_receipt_leaves_once_with_the_time_until_the_answer() -> None:
    first, *others = asyncio.run(answers(fresh(), 3))
    found = first["meta_info"][META_KEY]
    assert found["causes"]["computing"] == 2.0
    assert found["ttft_ms"] == round(sum(found["causes"].values()), 3) >= 10.0
    assert all(META_KEY not in out["meta_info"] for out in others)


def test_a_clock_that_is_not_known_adds_nothing() -> None:
    (only,) = asyncio.run(answers(fresh(0.0), 1))
    assert only["meta_info"][META_KEY] == receipt()


@pytest.mark.parametrize("asks", [True, False])
def test_a_header_where_it_is_asked_for(asks: bool) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert bool(sent) is not asks  # the answer is held until the first token
        state = fresh(time.perf_counter())
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


def test_what_is_kept_of_answers_is_bounded() -> None:
    kept = OutsideTimes(2)
    for rid in ("a", "b", "c"):
        kept.add(rid, Outside(1000, 2000))
    assert kept.complete(receipt("a")) == receipt("a")
    assert kept.complete(receipt("c"))["causes"] == {"computing": 2.0, "tokenizing": 1.0, "answering": 2.0}


def test_spans_have_the_causes() -> None:
    state = fresh()
    assert answering._attributes({"a": 1}, None, state) == {"a": 1}
    state.laps_receipt = receipt()
    assert answering._attributes({}, None, state) == {"laps.causes_ms.computing": 2.0, "laps.behind": []}
