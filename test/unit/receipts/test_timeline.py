"""Timeline of the device and kept receipts, in the form that leaves the scheduler."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from laps_core.length import LONG, SHORT
from laps_core.receipts.extract import Extract, extract
from laps_core.receipts.ledger import Ledger
from laps_core.receipts.recent import Entry, Query, Recent
from laps_core.receipts.run import Run
from laps_core.receipts.timeline import trace


def entry(rid: str, cls: Any, arrived: int, end: int, **more: Any) -> Entry:
    known = {"new_tokens": 9, "first_us": None, "last_us": None, "transferred_us": None, "aborted": False, **more}
    return Entry(rid=rid, cls=cls, arrived_us=arrived, end_us=end, receipt=rid.encode(), **known)


def draw_timeline(ledger: Ledger, recent: Recent, end_us: int, **more: Any) -> list[dict[str, Any]]:
    """Return the trace events after encoding and decoding."""
    made = extract(ledger, recent, begin_us=0, end_us=end_us, epoch_s=0.0, **more)
    found = trace([msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Extract)])
    return list(msgspec.json.decode(msgspec.json.encode(found))["traceEvents"])


def test_trace_shows_preempting_batch_inside_paused_batch() -> None:
    ledger = Ledger()
    long = Run(cls=LONG, rids=("L",), tokens=(900,), begin_us=10, predicted_us=40, layers=4)
    short = Run(cls=SHORT, rids=("S",), tokens=(30,), begin_us=30, predicted_us=5, depth=1)
    ledger.record_start(long)
    ledger.record_end(short, 30, 42)
    ledger.record_end(long, 10, 70)
    ledger.record_hold(75, SHORT, "window", waits=True)
    device = [e for e in draw_timeline(ledger, Recent(), 100) if e["ph"] == "X" and e["tid"] == 1]
    assert [(e["name"], e["ts"], e["dur"]) for e in device] == [
        ("idle", 0, 10),
        ("long: 1 x, 900 tokens", 10, 60),
        ("slice", 10, 20),
        ("short: 1 x, 30 tokens", 30, 12),
        ("slice", 42, 28),
        ("idle", 70, 5),
        ("idle: window", 75, 25),
    ]
    args = {e["name"]: e["args"] for e in device}
    assert (args["long: 1 x, 900 tokens"]["predicted_ms"], args["long: 1 x, 900 tokens"]["measured_ms"]) == (
        0.04,
        0.048,
    )
    assert not args["long: 1 x, 900 tokens"]["late"]
    assert args["short: 1 x, 30 tokens"]["late"]


def test_step_of_twice_predicted_time_is_marked_late() -> None:
    ledger = Ledger()
    ledger.record_end(Run(cls=SHORT, begin_us=0, predicted_us=10), 0, 20)
    ledger.record_end(Run(streams=3, begin_us=20, predicted_us=11), 20, 40)
    ledger.record_end(Run(streams=3, begin_us=40), 40, 90)
    marks = [e for e in draw_timeline(ledger, Recent(), 100) if e["ph"] == "i"]
    assert [(e["name"], e["ts"]) for e in marks] == [("late step", 20)]


def test_trace_shows_wait_prefill_and_transfer_of_request() -> None:
    recent = Recent()
    recent.add(entry("a", SHORT, 5, 90, first_us=20, last_us=50, transferred_us=80))
    recent.add(entry("b", LONG, 10, 95, aborted=True))
    spans = [e for e in draw_timeline(Ledger(), recent, 100, dp_rank=2) if e["ph"] == "b"]
    assert {(e["id"], e["name"], e["ts"], e["pid"]) for e in spans} == {
        (0, "short request of 9 tokens", 5, 3),
        (0, "waits", 5, 3),
        (0, "prefill in progress", 20, 3),
        (0, "transfer", 50, 3),
        (1, "long request of 9 tokens", 10, 3),
        (1, "waits", 10, 3),
    }


def test_running_batch_is_drawn_until_now() -> None:
    ledger = Ledger()
    ledger.record_start(Run(cls=LONG, rids=("L",), tokens=(900,), begin_us=40))
    (batch,) = [e for e in draw_timeline(ledger, Recent(), 100) if e["name"].startswith("long:")]
    assert (batch["ts"], batch["dur"], batch["args"]["measured_ms"]) == (40, 60, None)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (Query(), "abcd"),
        (Query(rid="c"), "c"),
        (Query(rid="z"), ""),
        (Query(slowest=2), "ca"),
        (Query(cls=LONG), "bd"),
        (Query(cls=LONG, slowest=1), "d"),
        (Query(seconds=15e-6), "cd"),
    ],
)
def test_query_selects_receipts(query: Query, found: str) -> None:
    recent = Recent()
    for rid, cls, arrived, end in (("a", SHORT, 0, 30), ("b", LONG, 60, 65), ("c", SHORT, 10, 90), ("d", LONG, 80, 95)):
        recent.add(entry(rid, cls, arrived, end))
    assert "".join(e.rid for e in recent.find(query, 100)) == found


def test_oldest_receipts_are_dropped() -> None:
    recent = Recent(2)
    for rid in ("a", "b", "a", "c"):
        recent.add(entry(rid, SHORT, 0, 10))
    assert len(recent) == 2
    assert [e.rid for e in recent.find(Query(), 10)] == ["a", "c"]
    assert recent.find(Query(rid="b"), 10) == []
    assert len(recent.find(Query(rid="a"), 10)) == 1
