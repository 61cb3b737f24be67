"""Verdicts on all ends of a request, and the faults that excuse an end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from faults.comparison import Comparison
from faults.corpus import Case
from faults.evidence import DIED, LONG_PAUSE_S, STORM_WORDS, Evidence
from faults.oracle import CUT, HANG_S, HUNG, LOST, REFUSED, RIGHT, WRONG, Oracle, RequestRecord, judge
from faults.outcome import describe_failures, make_piece

from benchmark.results.piece import Piece

ROLES = {"prefill": ["p0", "p1"], "decode": ["d0", "d1"]}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def evidence(clock: Clock) -> Evidence:
    return Evidence(clock)


def make_record(**more: Any) -> RequestRecord:
    return RequestRecord(
        **{"number": 1, "action": "plain", "expected": [1, 2, 3], "begin": 100.0, "end": 102.0, **more}
    )


def complete_request(**more: Any) -> RequestRecord:
    return make_record(**{"status": 200, "answer": [1, 2, 3], "done": True, "reason": "length", **more})


def partial_request(**more: Any) -> RequestRecord:
    """Return a stream that ended with an error event."""
    return make_record(
        **{"status": 200, "answer": [1, 2], "stream": True, "begun": True, "reason": "upstream lost", **more}
    )


def record_fault(evidence: Evidence, clock: Clock, kind: str, server: str, begin: float, end: float) -> None:
    clock.now = begin
    with evidence.window(kind, server):
        clock.now = end


def record_event(evidence: Evidence, clock: Clock, server: str, at: float, what: str = "sent") -> None:
    clock.now = at
    evidence.note(1, server, what)


def verdict(record: RequestRecord, evidence: Evidence) -> str:
    return judge(record, evidence, ROLES).end


def test_only_complete_answer_is_right(evidence: Evidence) -> None:
    assert verdict(complete_request(), evidence) == RIGHT
    assert verdict(complete_request(expected=None), evidence) == RIGHT
    for got in ([1, 2], [1, 2, 4], [1, 2, 3, 4], []):
        assert verdict(complete_request(answer=got), evidence) == WRONG
    assert verdict(complete_request(broken="an event after the last one"), evidence) == LOST


def test_incorrect_partial_answer_is_wrong_despite_fault(evidence: Evidence, clock: Clock) -> None:
    record_event(evidence, clock, "d0", 100.1)
    record_fault(evidence, clock, "kill", "d0", 101.0, 130.0)
    assert verdict(partial_request(answer=[9]), evidence) == WRONG
    assert verdict(make_record(left=True, answer=[9]), evidence) == WRONG


def test_silent_request_is_hung_and_left_request_is_cut(evidence: Evidence) -> None:
    assert verdict(make_record(hung=True), evidence) == HUNG
    assert verdict(make_record(left=True), evidence) == CUT


def test_only_fault_of_own_decode_server_excuses_broken_stream(evidence: Evidence, clock: Clock) -> None:
    assert verdict(partial_request(), evidence) == LOST
    record_event(evidence, clock, "d0", 100.1)
    record_event(evidence, clock, "p0", 100.1)
    record_fault(evidence, clock, "kill", "d1", 101.0, 130.0)
    record_fault(evidence, clock, "kill", "p0", 101.0, 130.0)
    record_fault(evidence, clock, "flush", "d0", 101.0, 130.0)
    assert verdict(partial_request(), evidence) == LOST
    record_fault(evidence, clock, "kill", "d0", 101.0, 130.0)
    assert verdict(partial_request(), evidence) == CUT
    assert verdict(partial_request(answer=""), evidence) == CUT
    assert (
        verdict(partial_request(answer=None, begun=False), evidence) == LOST
    )  # no token had arrived, so a retry was possible
    assert verdict(partial_request(reason="", broken="reset"), evidence) == LOST  # the client must get a reason


def test_stream_with_reset_connection_is_cut(evidence: Evidence, clock: Clock) -> None:
    record_event(evidence, clock, "d0", 100.1)
    record_event(evidence, clock, "d0", 101.0, "reset")
    assert verdict(partial_request(), evidence) == CUT


def test_hanging_stream_must_end_in_time(evidence: Evidence, clock: Clock) -> None:
    record_event(evidence, clock, "d0", 100.1)
    record_event(evidence, clock, "d0", 101.0, "hang")
    assert verdict(partial_request(), evidence) == CUT
    assert verdict(partial_request(end=101.0 + HANG_S + 1.0), evidence) == HUNG
    assert verdict(partial_request(end=101.0 + HANG_S + 1.0, unread_s=30.0), evidence) == CUT
    assert verdict(complete_request(end=101.0 + HANG_S + 1.0), evidence) == RIGHT


def test_slot_of_nonreading_client_must_be_released_in_time(evidence: Evidence) -> None:
    stalled = {"unread_s": 65.0, "limit_s": 60.0, "may_cut": "nobody read its stream"}
    assert verdict(complete_request(**stalled), evidence) == HUNG
    assert verdict(complete_request(**{**stalled, "unread_s": 3.0}), evidence) == RIGHT
    assert verdict(partial_request(broken="reset", **stalled), evidence) == CUT
    assert verdict(partial_request(broken="reset", answer=[9], **stalled), evidence) == WRONG
    assert verdict(partial_request(broken="reset"), evidence) == LOST


def test_fault_excuses_unread_stream_only_if_router_could_notice(evidence: Evidence, clock: Clock) -> None:
    stalled = {"unread_s": 65.0, "limit_s": 60.0, "may_cut": "nobody read its stream", "end": 166.0}
    assert verdict(partial_request(**stalled), evidence) == HUNG
    record_event(evidence, clock, "d0", 100.1)
    record_fault(evidence, clock, "kill", "d0", 161.0, 165.0)
    assert verdict(partial_request(**stalled), evidence) == HUNG  # the lease should have ended before the fault
    record_fault(evidence, clock, "kill", "d0", 102.0, 130.0)
    assert verdict(partial_request(**stalled), evidence) == CUT


def test_refusal_needs_reason_and_excuse(evidence: Evidence, clock: Clock) -> None:
    assert verdict(make_record(status=503, reason="no server is healthy"), evidence) == LOST
    record_fault(evidence, clock, "kill", "d0", 95.0, 130.0)
    assert verdict(make_record(status=503, reason="no server is healthy"), evidence) == LOST  # there was another server
    assert verdict(make_record(status=502, reason="lost"), evidence) == LOST
    record_fault(evidence, clock, "stop", "d1", 80.0, 99.0)
    for status in (502, 503, 504):
        assert verdict(make_record(status=status, reason="no server is healthy"), evidence) == REFUSED
    assert verdict(make_record(status=503), evidence) == LOST
    assert verdict(make_record(status=500, reason="oh"), evidence) == LOST
    assert verdict(make_record(status=400, reason="bad"), evidence) == WRONG
    assert verdict(make_record(status=400, reason="bad", may_refuse=frozenset((400,))), evidence) == REFUSED


def test_exhausted_descriptors_excuse_refusals_and_closed_connections(evidence: Evidence, clock: Clock) -> None:
    closed = make_record(broken="closed without a reply")
    assert verdict(closed, evidence) == LOST
    record_fault(evidence, clock, "descriptors", "", 99.0, 101.0)
    assert verdict(closed, evidence) == CUT
    assert verdict(make_record(status=503, reason="out of descriptors"), evidence) == REFUSED
    assert verdict(make_record(status=502, reason="lost"), evidence) == LOST


def test_storm_error_counts_as_refusal(evidence: Evidence, clock: Clock) -> None:
    stormy = make_record(status=500, reason="a storm")
    assert verdict(stormy, evidence) == LOST
    assert verdict(make_record(status=502, reason=STORM_WORDS), evidence) == REFUSED
    record_event(evidence, clock, "p0", 100.2, "storm")
    assert verdict(stormy, evidence) == REFUSED


def test_two_faulty_servers_excuse_502(evidence: Evidence, clock: Clock) -> None:
    lost = make_record(status=502, reason="lost")
    record_fault(evidence, clock, "kill", "p0", 100.5, 130.0)
    assert verdict(lost, evidence) == LOST
    record_event(evidence, clock, "d0", 100.6, "reset")
    assert verdict(lost, evidence) == REFUSED


def test_requested_abort_counts_as_cut(evidence: Evidence) -> None:
    assert verdict(complete_request(answer=[1, 2], reason="abort", aborted=True), evidence) == CUT
    assert verdict(complete_request(answer=[1, 2], reason="abort"), evidence) == WRONG
    assert verdict(complete_request(answer=[1, 4], reason="abort", aborted=True), evidence) == WRONG
    assert verdict(make_record(status=500, reason="Aborted by AbortReq", aborted=True), evidence) == CUT


def test_hostile_request_may_get_server_error(evidence: Evidence, clock: Clock) -> None:
    theirs = make_record(status=500, reason="oh", expected=None)
    assert verdict(theirs, evidence) == LOST
    record_event(evidence, clock, "p0", 100.2, "answered 500")
    assert verdict(theirs, evidence) == REFUSED


def test_oracle_counts_each_request_number_once(evidence: Evidence) -> None:
    oracle = Oracle(evidence, ROLES)
    for it in (
        complete_request(),
        complete_request(number=2),
        make_record(number=3, hung=True),
        complete_request(number=2),
    ):
        oracle.judge_and_count(it)
    assert (oracle.total(RIGHT), oracle.total(HUNG), oracle.repeated) == (2, 1, [2])
    assert [f["number"] for f in oracle.failures] == [3]


def test_written_result_lists_every_missed_bar(evidence: Evidence, tmp_path: Path) -> None:
    oracle = Oracle(evidence, ROLES)
    for it in (complete_request(), make_record(number=2, hung=True), complete_request()):
        oracle.judge_and_count(it)
    ours = make_record(status=400, reason="no")
    compared = [
        Comparison(Case("fine", b""), ours, ours),
        Comparison(Case("worse", b""), make_record(status=500), ours),
    ]
    made = make_piece(
        oracle,
        compared,
        seed=1,
        seconds=2.0,
        inflicted=Counter({("decode", "kill"): 2, ("router", "flush"): 1}),
        wrong={"tracebacks and alarms in logs": ["a.log: oh"], "processes that ended and were not killed": []},
        own_logs=Counter({"theirs": 3}),
        sent=3,
        settings={"requests": 2},
    )
    made.write(tmp_path)
    again = Piece.read(tmp_path)
    assert {f.name: f.value for f in again.figures if f.met is False} == {
        "requests hung": 1, "requests that ended twice": 1, "tracebacks and alarms in logs": 1,
        "hostile requests taken worse than by stock": 1, "hostile requests not compared": 1,
    }  # fmt: skip
    assert again.data["ends"] == {"plain": {"right": 1, "hung": 1}}
    assert again.data["inflicted"] == {"decode kill": 2, "router flush": 1}
    assert again.data["tracebacks_of_sglang"] == {"theirs": 3}
    assert [line.partition(":")[0] for line in describe_failures(made)] == [
        "hung", "requests that ended twice", "tracebacks and alarms in logs",
        "hostile requests taken worse than by stock",
    ]  # fmt: skip
    assert describe_failures(made, 2)[-1] == "and 2 more in the result"


def test_request_that_seemed_to_kill_server_counts_as_refused(evidence: Evidence, clock: Clock) -> None:
    refused = make_record(status=502, answer=None, reason="decode: Connection reset by peer")
    record_event(evidence, clock, "p1", 100.0)
    assert verdict(refused, evidence) == LOST
    record_event(evidence, clock, "d0", 100.0, DIED)
    assert verdict(refused, evidence) == REFUSED
    assert verdict(make_record(status=503, answer=None, reason="nobody"), evidence) == LOST


def test_router_may_end_stream_after_long_silence(evidence: Evidence, clock: Clock) -> None:
    def passed(at: float, server: str = "d0") -> None:
        clock.now = at
        evidence.record_chunk(1, server)

    def ends(at: float) -> str:
        return verdict(partial_request(end=at), evidence)

    passed(100.5)
    passed(101.0)
    assert ends(101.0 + LONG_PAUSE_S - 0.1) == LOST, "the router must wait longer"
    assert ends(101.0 + LONG_PAUSE_S) == CUT
    assert verdict(partial_request(end=120.0, reason=""), evidence) == LOST, "it says why"
    passed(101.0 + LONG_PAUSE_S)
    assert ends(112.0) == CUT, "the pause before counts: what has come meanwhile comes too late"
    record_fault(evidence, clock, "stop", "d1", 100.0, 105.0)
    nobody = make_record(status=503, answer=None, reason="no decode server is healthy", begin=104.0, end=108.0)
    assert verdict(nobody, evidence) == REFUSED, "both had a fault"
    passed(112.0, "d1")
    assert ends(113.0) == LOST, "a pause of the server that had it before is none of this stream"
