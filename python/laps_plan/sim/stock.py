"""SGLang's own policies, modelled from their documentation.

A batch packs waiting requests into the token budget of a chunk. The prompt in progress goes first. A prompt that does
not fit is cut; only one prompt is in progress at a time.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

from laps_plan.sim.request import Batch, Request


class Scheduler(Protocol):
    """One server's scheduler. Times are simulated seconds."""

    @property
    def waiting_tokens(self) -> int:
        """Return the number of new tokens that wait, including those of the prompt in progress."""

    def add(self, request: Request, now: float) -> None: ...

    def next(self, now: float) -> Batch | float | None:
        """Return a batch to run, the time to ask again if no request arrives earlier, or None if there is no work."""

    def decision_time_s(self, now: float, batch: Batch) -> float:
        """Return the time at which the overlap loop decides what follows the running ``batch``."""
        return now

    def finished(self, batch: Batch, now: float) -> None:
        """Process the results of a batch at ``now``; it was on the device from ``batch.begin`` to ``batch.end``."""


class AtOnce:
    """Scheduler that decides on the next batch as soon as a batch runs, as SGLang does."""

    def decision_time_s(self, now: float, batch: Batch) -> float:
        return now


class Stock(AtOnce):
    """Base of all stock policies; a subclass picks the next request. ``chunk`` (tokens): None = no chunks."""

    def __init__(self, chunk: int | None) -> None:
        self.budget = chunk or 1 << 60
        """Maximum new tokens of a batch."""
        self._parked: Request | None = None
        self.waiting_tokens = 0

    def add(self, request: Request, now: float) -> None:
        self.waiting_tokens += request.left
        self._enter(request)

    def next(self, now: float) -> Batch | float | None:
        parts: list[tuple[Request, int, int]] = []
        ending: list[Request] = []
        room = self.budget
        parked, self._parked = self._parked, None
        if parked is not None:
            room -= self._take(parked, self._limit(parked, room), parts, ending)
        self._sort(room)
        while room > 0:
            request = self._head()
            if request is None or not self._may_start(request, room):
                break
            self._leave()
            request.started = now
            room -= self._take(request, room, parts, ending)
        return Batch(parts, ending) if parts else None

    def finished(self, batch: Batch, now: float) -> None:
        """See Scheduler."""

    def _take(self, request: Request, room: int, parts: list[tuple[Request, int, int]], ending: list[Request]) -> int:
        new = min(request.left, room)
        parts.append((request, new, request.history))
        request.left -= new
        request.history += new
        self.waiting_tokens -= new
        if request.left:
            self._parked = request
        else:
            ending.append(request)
        return new

    def _limit(self, parked: Request, room: int) -> int:
        """Return the share of the token budget that the prompt in progress may take (tokens)."""
        return room

    def _may_start(self, request: Request, room: int) -> bool:
        return True

    def _sort(self, room: int) -> None:
        """Sort the waiting requests."""

    def _enter(self, request: Request) -> None:
        raise NotImplementedError

    def _head(self) -> Request | None:
        raise NotImplementedError

    def _leave(self) -> None:
        """Remove the head of the queue."""
        raise NotImplementedError


class Fcfs(Stock):
    """First come, first served."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__(chunk)
        self._queue: deque[Request] = deque()

    def _enter(self, request: Request) -> None:
        self._queue.append(request)

    def _head(self) -> Request | None:
        return self._queue[0] if self._queue else None

    def _leave(self) -> None:
        self._queue.popleft()


class Hrrn(Fcfs):
    """Highest response ratio next: tokens processed since arrival over the request's own uncached tokens.

    With more than 128 waiting requests the server does not sort, and takes requests in their present order.
    """

    SORTED_UP_TO = 128

    def __init__(self, chunk: int | None) -> None:
        super().__init__(chunk)
        self._processed = 0

    def _enter(self, request: Request) -> None:
        request.processed_at_arrival = self._processed
        super()._enter(request)

    def _sort(self, room: int) -> None:
        queue, processed = self._queue, self._processed
        if 1 < len(queue) <= self.SORTED_UP_TO:
            # SGLang orders equal ratios by request id, which is random; any fixed scatter of the numbers does as well.
            def key(r: Request) -> tuple[float, int]:
                return -(processed - r.processed_at_arrival) / r.left, r.number * 2654435761 & 0xFFFFFFFF

            self._queue = deque(sorted(queue, key=key))

    def finished(self, batch: Batch, now: float) -> None:
        self._processed += sum(new for _, new, _ in batch.parts)


class ShortestFirst(Stock):
    """``shortest-prefill-first``: fewest uncached tokens first.

    The prompt in progress leaves token budget for shorter waiting prompts. Beside this prompt no other is cut.
    """

    def __init__(self, chunk: int | None) -> None:
        super().__init__(chunk)
        self._heap: list[tuple[int, int, Request]] = []

    def _enter(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.left, request.number, request))

    def _limit(self, parked: Request, room: int) -> int:
        shorter, reserved = [], 0
        while self._heap:
            work = self._heap[0][0]
            if work >= parked.left or reserved + work > room - 1:
                break
            reserved += work
            shorter.append(heapq.heappop(self._heap))
        for item in shorter:
            heapq.heappush(self._heap, item)
        return room - reserved if room >= 2 else room

    def _may_start(self, request: Request, room: int) -> bool:
        return self._parked is None or request.left <= room

    def _head(self) -> Request | None:
        return self._heap[0][2] if self._heap else None

    def _leave(self) -> None:
        heapq.heappop(self._heap)


POLICIES: dict[str, type[Stock]] = {"fcfs": Fcfs, "hrrn": Hrrn, "shortest-prefill-first": ShortestFirst}
