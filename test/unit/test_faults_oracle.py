"""Verdicts on all ends of a request, and the faults that excuse an end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from faults.comparison import Compared
from faults.corpus import Case
from faults.evidence import DIED, STILL_S, STORM_WORDS, Evidence
from faults.oracle import CUT, FILLED_S, HANG_S, HUNG, LOST, REFUSED, RIGHT, WRONG, Oracle, Seen, judge
from faults.outcome import complaints, piece

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


def seen(**more: Any) -> Seen:
    return Seen(**{"number": 1, "deed": "plain", "want": [1, 2, 3], "begin": 100.0, "end": 102.0, **more})


def whole(**more: Any) -> Seen:
    return seen(**{"status": 200, "got": [1, 2, 3], "done": True, "reason": "length", **more})


def begun(**more: Any) -> Seen:
    """Return a stream that ended with an error event."""
    return seen(**{"status": 200, "got": [1, 2], "stream": True, "begun": True, "reason": "upstream lost", **more})


def fault(evidence: Evidence, clock: Clock, kind: str, server: str, begin: float, end: float) -> None:
    clock.now = begin
    with evidence.window(kind, server):
        clock.now = end


def sent(evidence: Evidence, clock: Clock, server: str, at: float, what: str = "sent") -> None:
    clock.now = at
    evidence.note(1, server, what)


def end(it: Seen, evidence: Evidence) -> str:
    return judge(it, evidence, ROLES).end


def test_right_is_the_whole_answer_and_nothing_else(evidence: Evidence) -> None:
    assert end(whole(), evidence) == RIGHT
    assert end(whole(want=None), evidence) == RIGHT
    for got in ([1, 2], [1, 2, 4], [1, 2, 3, 4], []):
        assert end(whole(got=got), evidence) == WRONG
    assert end(whole(broken="an event after the last one"), evidence) == LOST


def test_a_part_that_is_not_right_is_wrong_whatever_happened(evidence: Evidence, clock: Clock) -> None:
    sent(evidence, clock, "d0", 100.1)
    fault(evidence, clock, "kill", "d0", 101.0, 130.0)
    assert end(begun(got=[9]), evidence) == WRONG
    assert end(seen(left=True, got=[9]), evidence) == WRONG


def test_silence_is_hung_and_leaving_is_a_cut(evidence: Evidence) -> None:
    assert end(seen(hung=True), evidence) == HUNG
    assert end(seen(left=True), evidence) == CUT


def test_a_stream_is_cut_only_by_a_fault_of_its_own_decode_server(evidence: Evidence, clock: Clock) -> None:
    assert end(begun(), evidence) == LOST
    sent(evidence, clock, "d0", 100.1)
    sent(evidence, clock, "p0", 100.1)
    fault(evidence, clock, "kill", "d1", 101.0, 130.0)
    fault(evidence, clock, "kill", "p0", 101.0, 130.0)
    fault(evidence, clock, "flush", "d0", 101.0, 130.0)
    assert end(begun(), evidence) == LOST
    fault(evidence, clock, "kill", "d0", 101.0, 130.0)
    assert end(begun(), evidence) == CUT
    assert end(begun(got=""), evidence) == CUT
    assert end(begun(got=None, begun=False), evidence) == LOST  # no token had arrived, so a retry was possible
    assert end(begun(reason="", broken="reset"), evidence) == LOST  # the client must get a reason


def test_a_stream_whose_connection_was_reset_is_cut(evidence: Evidence, clock: Clock) -> None:
    sent(evidence, clock, "d0", 100.1)
    sent(evidence, clock, "d0", 101.0, "reset")
    assert end(begun(), evidence) == CUT


def test_a_stream_that_hung_must_be_cut_in_time(evidence: Evidence, clock: Clock) -> None:
    sent(evidence, clock, "d0", 100.1)
    sent(evidence, clock, "d0", 101.0, "hang")
    assert end(begun(), evidence) == CUT
    assert end(begun(end=101.0 + HANG_S + 1.0), evidence) == HUNG
    assert end(begun(end=101.0 + HANG_S + 1.0, unread_s=30.0), evidence) == CUT
    assert end(whole(end=101.0 + HANG_S + 1.0), evidence) == RIGHT


def test_no_slot_is_kept_for_a_client_that_does_not_read(evidence: Evidence) -> None:
    stalled = {"unread_s": 65.0, "limit_s": 60.0, "may_cut": "nobody read its stream"}
    assert end(whole(**stalled), evidence) == HUNG
    assert end(whole(**{**stalled, "unread_s": 3.0}), evidence) == RIGHT
    assert end(begun(broken="reset", **stalled), evidence) == CUT
    assert end(begun(broken="reset", got=[9], **stalled), evidence) == WRONG
    assert end(begun(broken="reset"), evidence) == LOST


def test_a_fault_explains_a_cut_unread_stream_only_if_the_router_could_notice_it(
    evidence: Evidence, clock: Clock
) -> None:
    stalled = {"unread_s": 65.0, "limit_s": 60.0, "may_cut": "nobody read its stream", "end": 166.0}
    assert end(begun(**stalled), evidence) == HUNG
    sent(evidence, clock, "d0", 100.1)
    fault(evidence, clock, "kill", "d0", 101.0 + FILLED_S, 130.0)
    assert end(begun(**stalled), evidence) == HUNG  # the router could not notice the fault
    fault(evidence, clock, "kill", "d0", 102.0, 130.0)
    assert end(begun(**stalled), evidence) == CUT


def test_a_refusal_needs_a_reason_and_an_occasion(evidence: Evidence, clock: Clock) -> None:
    assert end(seen(status=503, reason="no server is healthy"), evidence) == LOST
    fault(evidence, clock, "kill", "d0", 95.0, 130.0)
    assert end(seen(status=503, reason="no server is healthy"), evidence) == LOST  # there was another server
    assert end(seen(status=502, reason="lost"), evidence) == LOST
    fault(evidence, clock, "stop", "d1", 80.0, 99.0)
    for status in (502, 503, 504):
        assert end(seen(status=status, reason="no server is healthy"), evidence) == REFUSED
    assert end(seen(status=503), evidence) == LOST
    assert end(seen(status=500, reason="oh"), evidence) == LOST
    assert end(seen(status=400, reason="bad"), evidence) == WRONG
    assert end(seen(status=400, reason="bad", may_refuse=frozenset((400,))), evidence) == REFUSED


def test_descriptors_excuse_refusals_and_closed_doors(evidence: Evidence, clock: Clock) -> None:
    closed = seen(broken="closed without a reply")
    assert end(closed, evidence) == LOST
    fault(evidence, clock, "descriptors", "", 99.0, 101.0)
    assert end(closed, evidence) == CUT
    assert end(seen(status=503, reason="out of descriptors"), evidence) == REFUSED
    assert end(seen(status=502, reason="lost"), evidence) == LOST


def test_an_error_of_a_storm_is_a_refusal(evidence: Evidence, clock: Clock) -> None:
    stormy = seen(status=500, reason="a storm")
    assert end(stormy, evidence) == LOST
    assert end(seen(status=502, reason=STORM_WORDS), evidence) == REFUSED
    sent(evidence, clock, "p0", 100.2, "storm")
    assert end(stormy, evidence) == REFUSED


def test_two_faulty_servers_excuse_a_502(evidence: Evidence, clock: Clock) -> None:
    lost = seen(status=502, reason="lost")
    fault(evidence, clock, "kill", "p0", 100.5, 130.0)
    assert end(lost, evidence) == LOST
    sent(evidence, clock, "d0", 100.6, "reset")
    assert end(lost, evidence) == REFUSED


def test_an_abort_that_was_asked_for_is_a_cut(evidence: Evidence) -> None:
    assert end(whole(got=[1, 2], reason="abort", aborted=True), evidence) == CUT
    assert end(whole(got=[1, 2], reason="abort"), evidence) == WRONG
    assert end(whole(got=[1, 4], reason="abort", aborted=True), evidence) == WRONG
    assert end(seen(status=500, reason="Aborted by AbortReq", aborted=True), evidence) == CUT


def test_a_hostile_request_may_get_a_servers_own_error(evidence: Evidence, clock: Clock) -> None:
    theirs = seen(status=500, reason="oh", want=None)
    assert end(theirs, evidence) == LOST
    sent(evidence, clock, "p0", 100.2, "answered 500")
    assert end(theirs, evidence) == REFUSED


def test_books_count_each_number_once(evidence: Evidence) -> None:
    oracle = Oracle(evidence, ROLES)
    for it in (whole(), whole(number=2), seen(number=3, hung=True), whole(number=2)):
        oracle.ended(it)
    assert (oracle.total(RIGHT), oracle.total(HUNG), oracle.twice) == (2, 1, [2])
    assert [f["number"] for f in oracle.failures] == [3]


def test_the_result_is_written_with_every_bar(evidence: Evidence, tmp_path: Path) -> None:
    oracle = Oracle(evidence, ROLES)
    for it in (whole(), seen(number=2, hung=True), whole()):
        oracle.ended(it)
    ours = seen(status=400, reason="no")
    compared = [Compared(Case("fine", b""), ours, ours), Compared(Case("worse", b""), seen(status=500), ours)]
    made = piece(
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
    assert [line.partition(":")[0] for line in complaints(made)] == [
        "hung", "requests that ended twice", "tracebacks and alarms in logs",
        "hostile requests taken worse than by stock",
    ]  # fmt: skip
    assert complaints(made, 2)[-1] == "and 2 more in the result"


def test_what_a_server_may_have_died_of_alone_is_refused(evidence: Evidence, clock: Clock) -> None:
    refused = seen(status=502, got=None, reason="decode: Connection reset by peer")
    sent(evidence, clock, "p1", 100.0)
    assert end(refused, evidence) == LOST
    sent(evidence, clock, "d0", 100.0, DIED)
    assert end(refused, evidence) == REFUSED
    assert end(seen(status=503, got=None, reason="nobody"), evidence) == LOST


def test_a_stream_of_which_nothing_comes_for_long_may_be_ended(evidence: Evidence, clock: Clock) -> None:
    def passed(at: float, server: str = "d0") -> None:
        clock.now = at
        evidence.passed(1, server)

    def ends(at: float) -> str:
        return end(begun(end=at), evidence)

    passed(100.5)
    passed(101.0)
    assert ends(101.0 + STILL_S - 0.1) == LOST, "the router must wait longer"
    assert ends(101.0 + STILL_S) == CUT
    assert end(begun(end=120.0, reason=""), evidence) == LOST, "it says why"
    passed(101.0 + STILL_S)
    assert ends(112.0) == CUT, "the pause before counts: what has come meanwhile comes too late"
    fault(evidence, clock, "stop", "d1", 100.0, 105.0)
    nobody = seen(status=503, got=None, reason="no decode server is healthy", begin=104.0, end=108.0)
    assert end(nobody, evidence) == REFUSED, "both had a fault"
    passed(112.0, "d1")
    assert ends(113.0) == LOST, "a pause of the server that had it before is none of this stream"
