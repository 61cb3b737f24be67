"""Policies proposed for stock servers, modelled from the proposals: several prompts can be in progress.

A prompt in progress keeps its memory, so the number of prompts in progress is limited.
"""

from __future__ import annotations

from collections.abc import Iterator

from laps_plan.sim.request import Batch, Request
from laps_plan.sim.stock import Stock

IN_PROGRESS = 8
"""Maximum number of prompts in progress at a time."""
PATIENCE_S = 2.0
"""D of PREFLOW's order (seconds): each wait of this length doubles a prompt's priority."""


class Several(Stock):
    """Several prompts in progress (sglang #34623): first come, first served. The token budget of each step is divided
    evenly among them; tokens that one prompt does not need go to the next."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__(chunk)
        self._queue: list[Request] = []

    def _enter(self, request: Request) -> None:
        self._queue.append(request)

    def _head(self) -> Request | None:
        return self._queue[0] if self._queue else None

    def next(self, now: float) -> Batch | float | None:
        parts: list[tuple[Request, int, int]] = []
        ending: list[Request] = []
        room = self.budget
        for request, most in self._shares(now):
            new = min(request.left, most, room)
            if not new:
                continue
            if request.started < 0.0:
                request.started = now
            room -= self._take(request, new, parts, ending)
        self._parked = None
        self._queue = [r for r in self._queue if r.left]
        return Batch(parts, ending) if parts else None

    def _shares(self, now: float) -> Iterator[tuple[Request, int]]:
        """Yield requests that may share the step, in order, each with its maximum number of tokens."""
        own = sorted(self._queue[:IN_PROGRESS], key=lambda r: r.left)
        room, cut = self.budget, 0
        for i, request in enumerate(own):
            share = min(request.left, max(1, room // (len(own) - i)))
            room -= share
            cut += share < request.left
            yield request, share
        for request in self._queue[IN_PROGRESS:]:
            # A request that ends with this step does not count as in progress.
            whole = request.left <= room
            if whole or cut < IN_PROGRESS:
                room -= min(room, request.left)
                cut += not whole
                yield request, request.left


class Interleaved(Several):
    """Chunk interleaving (sglang #39717): the prompts in progress take turns, a chunk each; other prompts that fit
    whole into the rest of the budget share the step."""

    def _shares(self, now: float) -> Iterator[tuple[Request, int]]:
        if not self._queue:
            return
        first = self._queue[0]
        room = self.budget - min(first.left, self.budget)
        yield first, first.left
        for request in self._queue[1:]:
            if request.left <= room:
                room -= request.left
                yield request, request.left
        # Its next turn comes after all others in progress, and before requests that wait for a place among them.
        self._queue = [*self._queue[1:IN_PROGRESS], first, *self._queue[IN_PROGRESS:]]


class Preflow(Several):
    """PREFLOW's order (vllm-ascend #16360): largest 2^(age / D) / (initial x remaining work) first, with work in
    tokens; the budget is filled in this order."""

    def _shares(self, now: float) -> Iterator[tuple[Request, int]]:
        def claim(r: Request) -> float:
            work = float(r.prompt - r.cached) * r.left
            return 2.0 ** min(500.0, (now - r.ready) / PATIENCE_S) / work

        started = sum(r.started >= 0.0 for r in self._queue)
        room = self.budget
        for request in sorted(self._queue, key=claim, reverse=True):
            if request.started < 0.0 and request.left > room:
                if started >= IN_PROGRESS:
                    continue
                started += 1
            room -= min(room, request.left)
            yield request, request.left
            if not room:
                return
