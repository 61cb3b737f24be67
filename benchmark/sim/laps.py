"""The LAPS scheduler: what ``sglang_laps.scheduler`` is to the server, this is to the simulator.

The decisions are those of ``sglang_laps.pacing.Pacer`` and the policies below it, unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from sglang_laps.pacing import LOOKAHEAD, LongWork, Pacer, Plan
from sglang_laps.policy.config import AUTO, LapsConfig
from sglang_laps.policy.latency import LatencyModel
from sglang_laps.policy.length import LONG, SHORT, LengthClass, new_tokens, usable_threshold
from sglang_laps.policy.window import Decision, ShortWaiting, Wait, Window

from benchmark.sim.request import Batch, Request

START_THRESHOLD = 256
"""Where "auto" starts (tokens)."""


class _Remembering(Window):
    """A window whose last decision can be read: a server asks again and again, a simulator must know when."""

    last: Decision

    def decide(self, now: float, shorts: Sequence[ShortWaiting], **known: Any) -> Decision:
        self.last = super().decide(now, shorts, **known)
        return self.last


class Laps:
    """Two queues and the pacer. ``chunk`` (tokens): one batch's budget, None = unlimited.

    ``learn``: the pacer's latency model learns from simulated steps instead of knowing the profile's.
    """

    def __init__(self, config: LapsConfig, chunk: int | None, model: LatencyModel, *, learn: bool = False) -> None:
        start = START_THRESHOLD if config.length_threshold == AUTO else int(config.length_threshold)
        self._threshold = usable_threshold(start, chunk, 1)
        self.pacer = Pacer(config, threshold=self._threshold, chunk_tokens=chunk, page_size=1)
        if not learn:
            self.pacer.model = model
        graphs = (config.graph_batches, config.graph_lengths) if config.graphs else ((), ())
        self.pacer.window = self._window = _Remembering(config, *graphs)
        self._learn = learn
        self._basis = config.length_basis
        self._slo_s = None if config.ttft_slo_ms is None else config.ttft_slo_ms / 1e3
        self._ordered = config.order != "fcfs"
        self._room = chunk or 1 << 30
        self._short: deque[Request] = deque()
        self._long: deque[Request] = deque()
        self._parked: Request | None = None
        self._fresh = 0
        self.waiting_tokens = 0

    def add(self, request: Request, now: float) -> None:
        """A request arrives: it is classed once, by the threshold of that moment."""
        tokens = request.class_tokens = new_tokens(request.prompt, request.history, self._basis)
        if request.slo_s is None:
            request.slo_s = self._slo_s
        deadline = None if request.slo_s is None else request.ready + request.slo_s
        request.view = (tokens, request.history, now, deadline, request.number)
        self.waiting_tokens += request.left
        if tokens <= self._threshold:
            self._short.append(request)
            self._fresh += 1
        else:
            self._long.append(request)

    def next(self, now: float) -> Batch | float | None:
        """See stock.Scheduler."""
        pacer, short, long, parked = self.pacer, self._short, self._long, self._parked
        fresh, self._fresh = self._fresh, 0
        pacer.arrived(now, fresh)
        if parked is not None or long:
            first = parked or long[0]
            # A view holds the class's tokens and the arrival.
            work = LongWork(first.left, first.history, first.view[2], first.view[0])
        elif short:
            work = None
        else:
            pacer.nothing_waits()
            return None
        plan = pacer.plan(
            now,
            [r.view for r in islice(short, LOOKAHEAD)],
            [r.view for r in islice(long, LOOKAHEAD)] if self._ordered else (),
            short=bool(short),
            long=work,
        )
        if not plan.order:
            last = self._window.last
            said: Batch | float | None = last.until_s if isinstance(last, Wait) else None
        else:
            cls = plan.order[0]
            contended = bool(short) and work is not None
            said = self._shorts(plan, now) if cls is SHORT else self._longs(plan, now)
            said.launch = pacer.launched(now, cls, len(said.parts), plan, contended=contended)
        if plan.threshold != self._threshold:
            self._reclass(plan.threshold)
        return said

    def finished(self, batch: Batch, now: float) -> None:
        """See stock.Scheduler."""
        shape = [(new, old) for _, new, old in batch.parts]
        launch = batch.launch
        assert launch is not None
        stock = self._learn and not batch.replayed
        self.pacer.finished(launch, batch.begin, batch.end, now, shape, stock=stock)
        name = launch.cls.value
        for r in batch.ending:
            if r.slo_s is not None:
                self.pacer.slo.record(now, name, now - r.ready, r.slo_s)

    def _shorts(self, plan: Plan, now: float) -> Batch:
        """Those picked, and behind them, where the view ended, whoever still fits."""
        short, picked = self._short, plan.picked
        seen = max(picked) + 1
        looked = [short.popleft() for _ in range(seen)]
        if seen == len(picked):
            taken = looked
        else:
            chosen = set(picked)
            taken = [looked[i] for i in picked]
            short.extendleft(r for i, r in reversed(list(enumerate(looked))) if i not in chosen)
        room = self._room
        parts = []
        for r in taken:
            room -= r.left
            parts.append((r, r.left, r.history))
        if seen >= LOOKAHEAD and seen == len(picked):
            while short and short[0].left <= room:
                r = short.popleft()
                taken.append(r)
                room -= r.left
                parts.append((r, r.left, r.history))
        for r in taken:
            r.started = now
            self.waiting_tokens -= r.left
            r.history += r.left
            r.left = 0
        return Batch(parts, taken)

    def _longs(self, plan: Plan, now: float) -> Batch:
        """The parked prompt first, then those that wait, cut where the budget ends."""
        room = min(plan.chunk_tokens or self._room, self._room)
        if plan.long_first:
            first = self._long[plan.long_first]
            del self._long[plan.long_first]
            self._long.appendleft(first)
        parts, ending = [], []
        while room > 0 and (self._parked is not None or self._long):
            if self._parked is not None:
                r, self._parked = self._parked, None
            else:
                r = self._long.popleft()
                r.started = now
            new = min(r.left, room)
            parts.append((r, new, r.history))
            room -= new
            r.left -= new
            r.history += new
            self.waiting_tokens -= new
            if r.left:
                self._parked = r
            else:
                ending.append(r)
        return Batch(parts, ending)

    def _reclass(self, threshold: int) -> None:
        """The threshold moved: those that wait are split again, in order of arrival."""
        self._threshold = threshold
        everyone = sorted((*self._short, *self._long), key=lambda r: (r.ready, r.number))
        queues: dict[LengthClass, deque[Request]] = {SHORT: deque(), LONG: deque()}
        for r in everyone:
            queues[SHORT if r.class_tokens <= threshold else LONG].append(r)
        self._short, self._long = queues[SHORT], queues[LONG]
