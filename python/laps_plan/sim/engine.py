"""The event loop, and one simulated server in it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, Protocol

from laps_core.busy import BusyMeter
from laps_core.length import ClassName

from laps_plan.sim.device import Device
from laps_plan.sim.metrics import Outcome, Record
from laps_plan.sim.request import Batch, Request
from laps_plan.sim.stock import Scheduler
from laps_plan.traffic.streams import Stream

Action = Callable[[float, Any], None]


class Events:
    """Future events, by time; events of the same time in the order in which they were added."""

    __slots__ = ("_count", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Action, Any]] = []
        self._count = 0

    def at(self, when: float, action: Action, what: Any) -> None:
        """Call ``action(when, what)`` at ``when`` (seconds)."""
        self._count += 1
        heapq.heappush(self.heap, (when, self._count, action, what))


class Server:
    """One prefill server: its scheduler, its device, the host's time around both.

    Without ``overlap`` the scheduler process decides, prepares the step, waits for the device, answers, decides again.
    With ``overlap``, SGLang's default, it launches a step, then decides on the next step and launches that, as soon as
    it can or as late as the scheduler says. Only then does it wait for the first step and answer. If there is no next
    step, it waits at once, and sees requests that arrive meanwhile only afterwards.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        device: Device,
        events: Events,
        *,
        meter: bool = False,
        overlap: bool = False,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.device = device
        self.busy_s = 0.0
        self.batches = 0
        self.meter = BusyMeter() if meter else None
        """Meter of the busy share that is reported to a router; None without."""
        self.spent: dict[ClassName, float] = {"short": 0.0, "long": 0.0}
        """Device time of each class (seconds), if there is a ``meter`` and the scheduler has classes."""
        self.answered: Callable[[float, Request], None] = lambda now, request: None
        """Callback for each first token that reaches its client."""
        self.ended: Callable[[float, Request], None] = lambda now, request: None
        """Callback for each last token that reaches its client."""
        p = device.profile
        self._front = p.front_s, p.front_token_s
        self._poll_s, self._ahead, self._launch_s = p.poll_s, p.ahead, p.launch_s
        self._overlap = overlap
        self._following: Batch | None = None
        """Batch launched behind the running batch."""
        self._has_front = p.front_s > 0.0 or p.front_token_s > 0.0
        self._step_host_s, self._reply_s = p.step_host_s, p.reply_s
        self._events = events
        self._front_free = 0.0
        self._running = False
        self._decision_count = 0
        """Number of decisions so far; a wake-up requested by an earlier decision does not count any more."""

    def send(self, now: float, request: Request) -> None:
        """Accept a client's request in the server process."""
        if not self._has_front:
            self._ready(now, request)
            return
        fixed, per_token = self._front
        self._front_free = max(now, self._front_free) + fixed + per_token * request.prompt
        self._events.at(self._front_free, self._ready, request)

    def _ready(self, now: float, request: Request) -> None:
        request.ready = now
        self.scheduler.add(request, now)
        if not self._running:
            self._round(now)

    def _wake(self, now: float, count: int) -> None:
        if count == self._decision_count and not self._running:
            self._round(now)

    def _round(self, now: float) -> None:
        decision = self.scheduler.next(now)
        self._decision_count += 1
        if decision is None:
            return
        if decision.__class__ is not Batch:
            self._events.at(decision, self._wake, self._decision_count)  # type: ignore[arg-type]
            return
        batch: Batch = decision  # type: ignore[assignment]
        self._running = True
        launched = self._launch(now, batch)
        if self._overlap:
            self._events.at(self.scheduler.decision_time_s(launched + self._poll_s, batch), self._decide, batch)
        else:
            self._events.at(batch.end, self._done, batch)

    def _launch(self, now: float, batch: Batch, behind: float = 0.0) -> float:
        """Give the batch to the device, which is busy until `behind`. Return the time at which the host has launched
        the batch; a slice counts as launched at once, because the slice before hides its launch."""
        sliced = batch.seconds is not None
        sent = now + (0.0 if batch.prepared else self._step_host_s)
        took = self.device.seconds(batch) if batch.seconds is None else batch.seconds
        launched = sent if sliced or not self._overlap else sent + self._launch_s
        batch.begin = max(sent, behind)
        batch.end = max(batch.begin + took, launched)
        self.busy_s += batch.end - batch.begin
        self.batches += bool(batch.parts)  # a sliced batch counts with its last slice
        return launched

    def _decide(self, now: float, batch: Batch) -> None:
        """Decide in the overlap loop what follows `batch`, which is launched; then wait for the result of `batch`."""
        # Within a pass the scheduler itself is a slice ahead.
        within = batch.within or (batch.running is not None and batch.running.within)
        decision = self.scheduler.next(now) if (batch.parts or batch.streams) and not within else None
        if decision.__class__ is Batch:
            self._following = decision  # type: ignore[assignment]
            now = self._launch(now, decision, batch.end)  # type: ignore[arg-type]
        self._events.at(max(now, batch.end), self._done, batch)

    def _done(self, now: float, batch: Batch) -> None:
        if self.meter is not None:
            self.meter.add(batch.begin, batch.end)
            if batch.running is not None:
                self.spent[batch.running.cls] += batch.end - batch.begin
        self.scheduler.finished(batch, now)
        self._reply(now + self._reply_s, batch)
        following, self._following = self._following, None
        if following is not None:
            self._events.at(self.scheduler.decision_time_s(now + self._poll_s, following), self._decide, following)
            return
        # A host that is a slice ahead has looked for new requests while the slice ran.
        ready = self._ahead and batch.seconds is not None and not batch.parts
        self._events.at(now if ready else now + self._poll_s, self._again, None)

    def _reply(self, reply: float, batch: Batch) -> None:
        """Report the results to clients at `reply`. Here an answer is only its first token."""
        answered, ended = self.answered, self.ended
        for request in batch.ending:
            answered(reply, request)
            ended(reply, request)

    def _again(self, now: float, _: None) -> None:
        self._running = False
        self._round(now)


class Fleet(Protocol):
    """Servers, and the router in front of them."""

    servers: list[Server]
    moves: list[tuple[float, str, str]]

    def send(self, now: float, request: Request) -> None:
        """Route ``request``, which a client sends at ``now``."""

    def answered(self, now: float, request: Request) -> None:
        """Take note that a request has been answered."""


def simulate(
    workload: Stream, fleet: Fleet, events: Events, *, chunk: int | None = None, until_s: float = math.inf
) -> Outcome:
    """Run until every request is answered, or until ``until_s``. ``chunk``: chunk size of the servers (tokens), for the
    outcome.

    Raises RuntimeError if requests are left but no events: a scheduler lost these requests.
    """
    record = Record()
    add, heap, pop = record.add, events.heap, heapq.heappop
    came = iter(workload.arrivals())
    follow = workload.answered if workload.follows else None
    send = fleet.send
    sent = ends = 0
    last = 0.0

    def answered(now: float, request: Request) -> None:
        add(request, now)

    def ended(now: float, request: Request) -> None:
        nonlocal last, sent, ends
        last = now
        ends += 1
        fleet.answered(now, request)
        if follow is not None and request.job is not None:
            following = follow(now, request.job)
            if following is not None:
                sent += 1
                events.at(following.at_s, send, Request.of(following))

    for server in fleet.servers:
        server.answered, server.ended = answered, ended
    coming = next(came, None)
    now = 0.0
    first = coming.at_s if coming is not None else 0.0
    while True:
        if coming is not None and (not heap or coming.at_s <= heap[0][0]):
            now = coming.at_s
            if now > until_s:
                break
            sent += 1
            send(now, Request.of(coming))
            coming = next(came, None)
        elif heap:
            if coming is None and ends == sent:
                # Only the beats of a controller are left.
                break
            now, _, action, what = pop(heap)
            if now > until_s:
                last = until_s
                break
            action(now, what)
        else:
            break
    left = sent - ends
    if left and not heap and coming is None and now <= until_s:
        raise RuntimeError(f"{left} of {sent} requests were lost")
    servers = fleet.servers
    profile = servers[0].device.profile
    return Outcome(
        record, profile, chunk, max(last - first, 1e-12), [s.busy_s for s in servers],
        sum(s.batches for s in servers), sent, list(fleet.moves),
    )  # fmt: skip
