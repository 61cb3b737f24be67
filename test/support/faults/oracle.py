"""Check that every request ends exactly once: answered right, refused with a reason, or cut by a fault that hit it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from faults.evidence import DIED, STORM_WORDS, Evidence

RIGHT, REFUSED, CUT = "right", "refused", "cut"
WRONG, LOST, HUNG = "wrong", "lost", "hung"
ENDS = (RIGHT, REFUSED, CUT, WRONG, LOST, HUNG)
BAD = frozenset((WRONG, LOST, HUNG))

AFTER_S = 10.0
"""Time after a fault in which a 503 still counts as its consequence (seconds): the router's longest pause between
probes, and two good probes."""
HANG_S = 45.0
"""Time within which the router must end the stream of a hanging server (seconds): less than the request limit."""
DECODE = "decode"
Roles = Mapping[str, Collection[str]]
"""Role -> names of its servers. Only faults of decode servers may cut streams."""


@dataclass(slots=True)
class RequestRecord:
    """One request as seen by its client. Times: monotonic seconds."""

    number: int
    action: str
    """Action of the client: see ``actions``."""
    expected: Any = None
    """Right answer; None if unknown (any answer is accepted)."""
    begin: float = 0.0
    end: float = 0.0
    status: int | None = None
    """HTTP status; None if there was no reply at all."""
    answer: Any = None
    """Answer received so far: token ids or text."""
    done: bool = False
    """True if the answer was complete by its own end marker."""
    reason: str = ""
    """Server's reason for an error or for the end of the answer."""
    broken: str = ""
    """Client's description of a broken connection or protocol error."""
    stream: bool = False
    begun: bool = False
    """True if the first event of the stream arrived, with or without text, so that a retry is impossible."""
    left: bool = False
    """True if the client disconnected, as planned."""
    hung: bool = False
    """True if the request did not end within the limit."""
    aborted: bool = False
    """True if the client asked to abort the request."""
    may_refuse: frozenset[int] = frozenset()
    """Statuses that are accepted for this request in addition to those accepted for all requests."""
    may_cut: str = ""
    """Reason why the connection may be closed without a reply; empty if it must not."""
    unread_s: float = 0.0
    """Time for which the client read nothing (seconds)."""
    limit_s: float = float("inf")
    """Longest time for which the router may keep the lease of a client that does not read (seconds)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """End of one request, and the reason for that verdict."""

    end: str
    why: str


def judge(record: RequestRecord, evidence: Evidence, roles: Roles) -> Verdict:
    """Return the verdict on one request."""
    if record.expected is not None and record.answer and record.answer != record.expected[: len(record.answer)]:
        return Verdict(WRONG, f"{_shorten(record.answer)} is not (the begin of) {_shorten(record.expected)}")
    if record.hung:
        return Verdict(HUNG, f"no end after {record.end - record.begin:.0f} s")
    if record.left:
        return Verdict(CUT, "the client left")
    if record.may_cut and record.broken:
        return Verdict(CUT, record.may_cut)
    if record.status is None:
        if any(w.kind == "descriptors" for w in evidence.active(record.begin, record.end, 1.0)):
            return Verdict(CUT, "not let in: the router's descriptors were used up")
        return Verdict(LOST, f"no reply: {_describe_failure(record)}")
    if record.status >= 400:
        return _judge_refusal(record, record.status, evidence, roles)
    if record.unread_s > record.limit_s and not evidence.fault_that_ended(
        record.number, record.begin, record.begin + record.limit_s, roles[DECODE]
    ):
        # A router that still sends has kept the lease of this client all the time, unless a fault ended the stream
        # before its buffers were full. On a slow machine they fill slowly.
        return Verdict(HUNG, f"its lease was kept though nobody read for {record.unread_s:.0f} s")
    if record.done and not record.broken:
        if record.expected is None or record.answer == record.expected:
            return Verdict(RIGHT, "")
        if record.aborted and "abort" in record.reason:
            return Verdict(CUT, "aborted as asked")
        return Verdict(
            WRONG,
            f"ended with {_shorten(record.answer)} of {_shorten(record.expected)} ({record.reason or 'no reason'})",
        )
    if record.aborted and record.reason:
        return Verdict(CUT, "aborted as asked")
    if record.stream and record.begun:
        fault = evidence.fault_that_ended(record.number, record.begin, record.end, roles[DECODE])
        hung_at = evidence.hang_time(record.number)
        # A client that does not read cannot see the end before it reads again.
        if hung_at is not None and record.end - max(hung_at, record.begin + record.unread_s) > HANG_S:
            return Verdict(HUNG, f"its stream was ended {record.end - hung_at:.0f} s after its server hung")
        if fault and record.reason:
            return Verdict(CUT, f"while streaming: {fault}")
        if record.reason and evidence.record_long_pause(record.number, record.end):
            return Verdict(CUT, "while streaming: its server stood still")
    if record.may_refuse and record.reason:
        return Verdict(REFUSED, "an error in the stream")
    return Verdict(LOST, f"{record.status} without its end: {_describe_failure(record)}")


def _judge_refusal(record: RequestRecord, status: int, evidence: Evidence, roles: Roles) -> Verdict:
    if not record.reason:
        return Verdict(LOST, f"{status} without a reason")
    if record.aborted and (status >= 500 or "abort" in record.reason.lower()):
        return Verdict(CUT, "aborted as asked")
    if status in record.may_refuse:
        return Verdict(REFUSED, f"{status}")
    whats = {h.what for h in evidence.hits(record.number)}
    if STORM_WORDS in record.reason or "storm" in whats:
        return Verdict(REFUSED, f"{status} of a storm")
    if status == 502 and DIED in whats:
        return Verdict(REFUSED, "502: what a server may have died of alone is not sent to the next")
    if status in (429, 502, 503, 504) and (warrant := reason_unserved(record, evidence, roles)):
        return Verdict(REFUSED, f"{status}: {warrant}")
    if 400 <= status < 500 and status != 429:
        return Verdict(WRONG, f"a good request was answered {status}: {record.reason}")
    if record.expected is None and f"answered {status}" in whats:
        return Verdict(REFUSED, f"{status} of a server")
    if len(victims := evidence.faulty_servers(record.number, record.begin, record.end)) > 1:
        return Verdict(REFUSED, f"{status}: faults of {len(victims)} servers met it")
    return Verdict(LOST, f"{status}: {record.reason}")


def reason_unserved(record: RequestRecord, evidence: Evidence, roles: Roles) -> str:
    """Return why the router could not serve the request (every server of a role had a fault, or descriptors were used
    up); empty if it could."""
    active = evidence.active(record.begin, record.end, AFTER_S)
    if any(w.kind == "descriptors" for w in active) and record.status != 502:
        return "descriptors used up"
    for role, names in roles.items():
        if set(names) <= {w.server for w in active}:
            return f"every {role} server had a fault"
    return ""


def _describe_failure(record: RequestRecord) -> str:
    return "; ".join(filter(None, (record.reason, record.broken))) or "nothing said"


def _describe_traces(record: RequestRecord, evidence: Evidence) -> str:
    """Return a failed request's events at the servers and the faults of its time, for debugging."""
    hits = [f"{h.at - record.begin:+.2f} {h.what} {h.server}" for h in evidence.hits(record.number)]
    faults = [
        f"{w.kind} {w.server or 'router'} from {w.begin - record.begin:+.2f}"
        + (f" to {w.end - record.begin:+.2f}" if w.end is not None else "")
        for w in evidence.active(record.begin, record.end, 5.0)
    ]
    return f"[{', '.join(hits) or 'seen by no server'}] faults [{', '.join(faults) or 'none'}]"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else text[:117] + "..."


@dataclass
class Oracle:
    """Judges requests and counts their ends; each number must end once."""

    evidence: Evidence
    roles: Roles
    ends: dict[int, str] = field(default_factory=dict)
    by_action: dict[str, Counter[str]] = field(default_factory=dict)
    why: Counter[str] = field(default_factory=Counter)
    """Ends that are neither right answers nor failures, by reason."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    """Numbers reported more than once."""

    def judge_and_count(self, record: RequestRecord) -> Verdict:
        """Judge and count one request."""
        verdict = judge(record, self.evidence, self.roles)
        if record.number in self.ends:
            self.repeated.append(record.number)
            return verdict
        self.ends[record.number] = verdict.end
        self.by_action.setdefault(record.action, Counter())[verdict.end] += 1
        if verdict.end in BAD:
            why = f"{verdict.why}; {_describe_traces(record, self.evidence)}"
            self.failures.append({
                "number": record.number, "deed": record.action, "end": verdict.end, "why": why,
                "status": record.status, "stream": record.stream, "seconds": round(record.end - record.begin, 3),
                "reason": record.reason, "broken": record.broken,
            })  # fmt: skip
        elif verdict.end != RIGHT:
            self.why[f"{verdict.end}: {verdict.why}"] += 1
        return verdict

    def had_fault(self, role: str, begin: float, end: float) -> bool:
        """Return True if a server of a role had a fault at any time of [begin, end] (monotonic seconds)."""
        return any(w.server in self.roles[role] for w in self.evidence.active(begin, end))

    def total(self, end: str) -> int:
        """Return the number of requests with this end."""
        return sum(c[end] for c in self.by_action.values())
