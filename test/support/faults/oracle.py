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
FILLED_S = 10.0
"""Time after which an unread stream has filled all buffers (seconds). At a later fault the router only waits
for the client, so the fault is no excuse."""
HANG_S = 45.0
"""Time within which the router must end the stream of a hanging server (seconds): less than the request limit."""
DECODE = "decode"
Roles = Mapping[str, Collection[str]]
"""Role -> names of its servers. Only faults of decode servers may cut streams."""


@dataclass(slots=True)
class Seen:
    """One request as seen by its client. Times: monotonic seconds."""

    number: int
    deed: str
    """Action of the client: see ``deeds``."""
    want: Any = None
    """Right answer; None if unknown (any answer is accepted)."""
    begin: float = 0.0
    end: float = 0.0
    status: int | None = None
    """HTTP status; None if there was no reply at all."""
    got: Any = None
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


def judge(seen: Seen, evidence: Evidence, roles: Roles) -> Verdict:
    """Return the verdict on one request."""
    if seen.want is not None and seen.got and seen.got != seen.want[: len(seen.got)]:
        return Verdict(WRONG, f"{_short(seen.got)} is not (the begin of) {_short(seen.want)}")
    if seen.hung:
        return Verdict(HUNG, f"no end after {seen.end - seen.begin:.0f} s")
    if seen.left:
        return Verdict(CUT, "the client left")
    if seen.may_cut and seen.broken:
        return Verdict(CUT, seen.may_cut)
    if seen.status is None:
        if any(w.kind == "descriptors" for w in evidence.active(seen.begin, seen.end, 1.0)):
            return Verdict(CUT, "not let in: the router's descriptors were used up")
        return Verdict(LOST, f"no reply: {_told(seen)}")
    if seen.status >= 400:
        return _refused(seen, seen.status, evidence, roles)
    if seen.unread_s > seen.limit_s and not evidence.struck(
        seen.number, seen.begin, seen.begin + FILLED_S, roles[DECODE]
    ):
        # A router that still sends has kept the lease of this client all the time.
        return Verdict(HUNG, f"its lease was kept though nobody read for {seen.unread_s:.0f} s")
    if seen.done and not seen.broken:
        if seen.want is None or seen.got == seen.want:
            return Verdict(RIGHT, "")
        if seen.aborted and "abort" in seen.reason:
            return Verdict(CUT, "aborted as asked")
        return Verdict(WRONG, f"ended with {_short(seen.got)} of {_short(seen.want)} ({seen.reason or 'no reason'})")
    if seen.aborted and seen.reason:
        return Verdict(CUT, "aborted as asked")
    if seen.stream and seen.begun:
        fault = evidence.struck(seen.number, seen.begin, seen.end, roles[DECODE])
        hung_at = evidence.hung_at(seen.number)
        # A client that does not read cannot see the end before it reads again.
        if hung_at is not None and seen.end - max(hung_at, seen.begin + seen.unread_s) > HANG_S:
            return Verdict(HUNG, f"its stream was ended {seen.end - hung_at:.0f} s after its server hung")
        if fault and seen.reason:
            return Verdict(CUT, f"while streaming: {fault}")
        if seen.reason and evidence.stood_still(seen.number, seen.end):
            return Verdict(CUT, "while streaming: its server stood still")
    if seen.may_refuse and seen.reason:
        return Verdict(REFUSED, "an error in the stream")
    return Verdict(LOST, f"{seen.status} without its end: {_told(seen)}")


def _refused(seen: Seen, status: int, evidence: Evidence, roles: Roles) -> Verdict:
    if not seen.reason:
        return Verdict(LOST, f"{status} without a reason")
    if seen.aborted and (status >= 500 or "abort" in seen.reason.lower()):
        return Verdict(CUT, "aborted as asked")
    if status in seen.may_refuse:
        return Verdict(REFUSED, f"{status}")
    whats = {h.what for h in evidence.hits(seen.number)}
    if STORM_WORDS in seen.reason or "storm" in whats:
        return Verdict(REFUSED, f"{status} of a storm")
    if status == 502 and DIED in whats:
        return Verdict(REFUSED, "502: what a server may have died of alone is not sent to the next")
    if status in (429, 502, 503, 504) and (warrant := nobody(seen, evidence, roles)):
        return Verdict(REFUSED, f"{status}: {warrant}")
    if 400 <= status < 500 and status != 429:
        return Verdict(WRONG, f"a good request was answered {status}: {seen.reason}")
    if seen.want is None and f"answered {status}" in whats:
        return Verdict(REFUSED, f"{status} of a server")
    if len(victims := evidence.victims(seen.number, seen.begin, seen.end)) > 1:
        return Verdict(REFUSED, f"{status}: faults of {len(victims)} servers met it")
    return Verdict(LOST, f"{status}: {seen.reason}")


def nobody(seen: Seen, evidence: Evidence, roles: Roles) -> str:
    """Return why the router could not serve the request (every server of a role had a fault, or descriptors were used
    up); empty if it could."""
    active = evidence.active(seen.begin, seen.end, AFTER_S)
    if any(w.kind == "descriptors" for w in active) and seen.status != 502:
        return "descriptors used up"
    for role, names in roles.items():
        if set(names) <= {w.server for w in active}:
            return f"every {role} server had a fault"
    return ""


def _told(seen: Seen) -> str:
    return "; ".join(filter(None, (seen.reason, seen.broken))) or "nothing said"


def _traces(seen: Seen, evidence: Evidence) -> str:
    """Return a failed request's events at the servers and the faults of its time, for debugging."""
    hits = [f"{h.at - seen.begin:+.2f} {h.what} {h.server}" for h in evidence.hits(seen.number)]
    faults = [
        f"{w.kind} {w.server or 'router'} from {w.begin - seen.begin:+.2f}"
        + (f" to {w.end - seen.begin:+.2f}" if w.end is not None else "")
        for w in evidence.active(seen.begin, seen.end, 5.0)
    ]
    return f"[{', '.join(hits) or 'seen by no server'}] faults [{', '.join(faults) or 'none'}]"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else text[:117] + "..."


@dataclass
class Oracle:
    """Judges requests and counts their ends; each number must end once."""

    evidence: Evidence
    roles: Roles
    ends: dict[int, str] = field(default_factory=dict)
    by_deed: dict[str, Counter[str]] = field(default_factory=dict)
    why: Counter[str] = field(default_factory=Counter)
    """Ends that are neither right answers nor failures, by reason."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    """Numbers reported more than once."""

    def ended(self, seen: Seen) -> Verdict:
        """Judge and count one request."""
        verdict = judge(seen, self.evidence, self.roles)
        if seen.number in self.ends:
            self.twice.append(seen.number)
            return verdict
        self.ends[seen.number] = verdict.end
        self.by_deed.setdefault(seen.deed, Counter())[verdict.end] += 1
        if verdict.end in BAD:
            why = f"{verdict.why}; {_traces(seen, self.evidence)}"
            self.failures.append({
                "number": seen.number, "deed": seen.deed, "end": verdict.end, "why": why,
                "status": seen.status, "stream": seen.stream, "seconds": round(seen.end - seen.begin, 3),
                "reason": seen.reason, "broken": seen.broken,
            })  # fmt: skip
        elif verdict.end != RIGHT:
            self.why[f"{verdict.end}: {verdict.why}"] += 1
        return verdict

    def at_fault(self, role: str, begin: float, end: float) -> bool:
        """Return True if a server of a role had a fault at any time of [begin, end] (monotonic seconds)."""
        return any(w.server in self.roles[role] for w in self.evidence.active(begin, end))

    def total(self, end: str) -> int:
        """Return the number of requests with this end."""
        return sum(c[end] for c in self.by_deed.values())
