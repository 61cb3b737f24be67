"""Receipts of a scheduler: no question ends it, and no id of a client fills its memory."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cores import make_core, make_flight
from fastapi.testclient import TestClient
from laps_core.receipts.receipt import LONGEST_ID, RECEIPTS_ROUTE, Receipt
from laps_core.receipts.recent import Query
from sglang.srt.entrypoints.http_server import app
from sglang.srt.managers.io_struct import GetInternalStateReq
from sglang_laps.classes import Tag
from sglang_laps.http import receipt_routes
from sglang_laps.telemetry.receipts import _PREFIX, Receipts, answer_query


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("seconds=1e305", 400), ("seconds=1e309", 400), ("seconds=inf", 400), ("seconds=nan", 400), ("seconds=0", 400),
        ("seconds=1e9", 200), ("seconds=0.5", 200), (f"slowest={10**400}", 200), ("slowest=0", 400),
    ],
)  # fmt: skip
def test_receipts_route_rejects_seconds_out_of_range(query: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    receipts: Any = Receipts(SimpleNamespace(), 0)  # type: ignore[arg-type]

    async def ask(_: Any, asked: Any) -> list[Any]:
        question = GetInternalStateReq(rid=_PREFIX + msgspec.json.encode(asked).decode())
        return [answer_query(question, receipts).internal_state[RECEIPTS_ROUTE]]

    monkeypatch.setattr(receipt_routes, "ask", ask)
    monkeypatch.setattr(receipt_routes, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=None))
    answer = TestClient(app).get(f"/laps_receipts?{query}")
    assert answer.status_code == code
    if code == 200:
        assert answer.json() == {"receipts": [], "kept": 0}


@pytest.mark.parametrize("text", ['{"seconds": 1e305}', "{", '{"slowest": "x"}'])
def test_failing_question_has_empty_answer(text: str, caplog: pytest.LogCaptureFixture) -> None:
    receipts: Any = Receipts(SimpleNamespace(), 0)  # type: ignore[arg-type]
    answer = answer_query(GetInternalStateReq(rid=_PREFIX + text), receipts)
    assert answer.internal_state == {RECEIPTS_ROUTE: {}}
    assert "a question about receipts failed" in caplog.text


def waiting(rid: str) -> Any:
    """Return a request that has waited for a second."""
    now = time.perf_counter()
    times = dict.fromkeys(("scheduler_recv_time", "created_time", "api_server_dispatch_time"), now - 1.0)
    never = dict.fromkeys(
        ("prefill_bootstrap_queue_entry_time", "bootstrap_done_time", "prefill_kv_transfer_finish_time"), 0.0
    )
    stats = SimpleNamespace(**times, **never, wait_queue_entry_time=now - 0.9)
    return SimpleNamespace(
        rid=rid, seqlen=300, origin_input_ids=range(300), output_ids=[], cached_tokens=0, finished_reason=None,
        time_stats=stats, laps_tag=Tag(0.0, 0.0, new_tokens=300, looked=0),
    )  # fmt: skip


def test_long_ids_are_cut_in_receipts() -> None:
    laps = make_core()
    me = Receipts(laps, 0)
    first, second = reqs = [waiting(f"{name}{'x' * 1_000_000}") for name in "ab"]
    batch = make_flight(laps, cut=first, started=time.perf_counter() - 0.5)
    batch.reqs = [first]
    me.record_start(batch)
    me._ended(batch, time.perf_counter())
    for req in reqs:
        me.record_abort(req)
    (entry,) = me.recent.find(Query(rid=second.rid), 0)
    made = msgspec.json.decode(entry.receipt, type=Receipt)
    assert [len(rid) for rid in (entry.rid, made.rid, made.behind[0].rid)] == [LONGEST_ID] * 3
    assert len(me.answer('{"timeline": true, "seconds": 5}')["timeline"]) < 3000


def test_receipt_of_retracted_request_that_is_aborted_does_not_wait() -> None:
    """Otherwise the output of each later decode step would be searched for receipts."""
    laps = make_core()
    laps.decode = SimpleNamespace()  # type: ignore[assignment]
    me, req = Receipts(laps, 0), waiting("a")
    req.output_ids = [5]
    batch = make_flight(laps, started=time.perf_counter() - 0.5)
    batch.reqs = [req]
    with me.result_of(batch):
        pass
    with me.result_of(None):
        me.record_abort(req)
        assert not me.due
        assert me.take_receipts([req]) == [[]]


def test_receipt_is_found_by_id_at_router() -> None:
    me = Receipts(make_core(), 0)
    for rid in ("a.prefill", "b", "b.prefill"):
        me.record_abort(waiting(rid))
    found = {rid: [e.rid for e in me.recent.find(Query(rid=rid), 0)] for rid in ("a", "a.prefill", "b", "c")}
    assert found == {"a": ["a.prefill"], "a.prefill": ["a.prefill"], "b": ["b"], "c": []}


def test_batch_of_many_short_requests_keeps_few_names() -> None:
    laps = make_core()
    me = Receipts(laps, 0)
    reqs = [waiting(f"r{i}") for i in range(300)]
    batch = make_flight(laps, cut=None, started=time.perf_counter() - 0.5)
    batch.reqs, batch.shape, batch.short = reqs, [(i, 0) for i in range(300)], range(300)
    me.record_start(batch)
    assert batch.run is not None
    assert batch.run.rids == tuple(f"r{i}" for i in range(8))
    assert (batch.run.request_count, batch.run.new_tokens) == (300, sum(range(300)))
    # Long prompts run in several batches, whose times add up: all of them are named.
    batch.short = range(100, 300)
    me.record_start(batch)
    assert len(batch.run.rids) == 108
    assert (batch.run.request_count, batch.run.new_tokens) == (300, sum(range(300)))
