"""LAPS scheduler of the simulator, the counterpart of ``sglang_laps.scheduler`` in a server.

All decisions are those of ``laps_core.policy.pacer.Pacer`` and the policies below it, unchanged.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

from laps_core.config import LapsConfig
from laps_core.deadline import due_s
from laps_core.latency.model import LatencyModel
from laps_core.length import CLASSES, LONG, SHORT, ClassName, classify, new_tokens
from laps_core.paper import pacer
from laps_core.policy.types import LOOKAHEAD, DecodeStep, Paused, Plan, Running, Waiting

from laps_plan.sim.device import Device
from laps_plan.sim.memory import Memory
from laps_plan.sim.request import Batch, Request, Sliced


class Laps:
    """Two queues and the pacer. ``chunk``: token budget of a batch, None = unlimited. ``memory``: None = unlimited.
    ``device``: gives the time of a batch that runs in slices. ``learn``: the pacer's latency model is fitted to
    simulated steps, not taken from the profile."""

    def __init__(
        self,
        config: LapsConfig,
        chunk: int | None,
        model: LatencyModel,
        *,
        device: Device,
        learn: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self._layers = device.profile.layers if config.slice_ms else 0
        self.pacer = pacer(config, chunk_tokens=chunk, layers=self._layers, model=None if learn else model)
        if self._layers:
            self.pacer.sizes.launch_s = device.profile.slices_launch_s
        self.pacer.sizes.record_launch_time(device.profile.launch_s + device.profile.step_host_s)
        self._threshold = self.pacer.threshold_tokens
        self._learn = learn
        self._device = device
        self._memory = memory
        self._lacking = False
        """True if the first long prompt found too little memory at its last attempt."""
        self._basis = config.length_basis
        self._slo_s = {kind: config.deadline_s(kind) for kind in CLASSES}
        self._token_budget = chunk or 1 << 30
        self._short: deque[Request] = deque()
        self._long: list[Request] = []
        self._under_way: list[Sliced] = []
        self._ahead = device.profile.ahead
        self._in_pause = False
        """True if a slice has just ended and its batch has more slices."""
        self._next_after_slice: Batch | None = None
        """Batch that runs after the slice that was launched before the decision."""
        self._fresh = 0
        self._free_s = -math.inf
        """Time at which the running batch is predicted to end."""
        self.waiting_tokens = 0

    def add(self, request: Request, now: float) -> None:
        """Add a request to the queue of its class, by the threshold at this time."""
        tokens = request.class_tokens = new_tokens(request.prompt, request.history, self._basis)
        if request.slo_s is None:
            request.slo_s = self._slo_s[classify(tokens, self._threshold)]
        request.view = Waiting(request.left, request.history, now, due_s(request.ready, request.slo_s))
        self.waiting_tokens += request.left
        if tokens <= self._threshold:
            self._short.append(request)
            self._fresh += 1
        else:
            self._long.append(request)

    def next(self, now: float) -> Batch | float | None:
        pacer, under_way = self.pacer, self._under_way
        if self._next_after_slice is not None:
            then, self._next_after_slice = self._next_after_slice, None
            return then
        launched = under_way[-1] if self._ahead and self._in_pause else None
        self._in_pause = False
        if launched is not None and launched.left == 1:
            return self._slice(launched)
        if self._memory is not None:
            self._memory.settle(now)
        fresh, self._fresh = self._fresh, 0
        pacer.record_arrivals(now, fresh, busy=self._free_s > now)
        if not (self._short or self._long or under_way):
            pacer.record_empty_queue()
            return None
        paused = None
        if under_way:
            top = under_way[-1]
            left_s = sum(top.slices[: -1 if launched is not None else None])
            requests = [r for s in under_way for r, _, _ in s.whole.parts]
            weight = pacer.sizes.weight(r.view for r in requests)
            dues = tuple(r.view.deadline_s for r in requests if r.view.deadline_s is not None)
            slice_s = top.slices[-1]
            rows = any(s.whole.streams for s in under_way)
            paused = Paused(left_s, len(under_way), weight=weight, deadlines=dues, slice_s=slice_s, rows=rows)
        below = {id(r) for s in under_way for r, _, _ in s.whole.parts}
        longs = [r for r in islice(self._long, LOOKAHEAD) if id(r) not in below]
        shorts, lines = [r.view for r in islice(self._short, LOOKAHEAD)], [r.current_view or _long(r) for r in longs]
        drains, free_s = self._drains(), self._free_s
        plan = pacer.plan(now, shorts, lines, paused=paused, lacking=self._lacking, drains=drains, free_s=free_s)
        plan = self._adjust_plan(now, plan, shorts, lines, paused)
        decision = self._carry_out(now, plan, longs)
        if plan.threshold != self._threshold:
            self._reclass(plan.threshold)
        if launched is not None and isinstance(decision, Batch) and decision.sliced_batch is not launched:
            decision.prepared, self._next_after_slice = True, decision
            return self._slice(launched)
        return decision

    def _drains(self) -> ClassName | None:
        """See Pacer.plan."""
        memory = self._memory
        if memory is None or not self._lacking:
            return None
        if memory.holds_more_than(self._threshold) or any(r.started >= 0.0 for r in self._long):
            return LONG
        return SHORT if self._under_way or memory.fetched_s is not None else None

    def _adjust_plan(
        self, now: float, plan: Plan, shorts: list[Waiting], longs: list[Waiting], paused: Paused | None
    ) -> Plan:
        """Return the plan, which a subclass can change. `shorts`, `longs`: requests that the plan picks from."""
        return plan

    def _carry_out(self, now: float, plan: Plan, longs: list[Request]) -> Batch | float | None:
        """Return the batch or time of ``next`` by this plan; if no batch is picked, the paused batch continues."""
        for cls in plan.order:
            if cls == LONG and plan.mixed:
                return self._shared(longs, plan, now)
            batch: Batch | None = self._shorts(plan, now) if cls == SHORT else self._longs(longs, plan, now)
            if batch is not None:
                return self._send(cls, batch, plan, now)
        if self._under_way:
            return self._slice(self._under_way[-1])
        if plan.held == "window":
            return plan.account.until_s
        return None if self._memory is None else self._memory.fetched_s

    def _shared(self, longs: list[Request], plan: Plan, now: float) -> Batch | float | None:
        """Return a batch of the picked short requests, and of long prompts within the remaining token budget."""
        short = self._shorts(plan, now) or Batch([], [])
        long = self._longs(longs, plan, now, taken=sum(new for _, new, _ in short.parts))
        if long is None:
            if short.parts:
                return self._send(SHORT, short, plan, now)
            return None if self._memory is None else self._memory.fetched_s
        both = Batch(short.parts + long.parts, short.ending + long.ending)
        return self._send(LONG, both, plan, now, shorts=len(short.parts))

    def _send(self, cls: ClassName, batch: Batch, plan: Plan, now: float, shorts: int = 0) -> Batch:
        shape = [(new, old) for _, new, old in batch.parts]
        short = range(len(shape) if cls == SHORT else shorts)
        shape += [(1, batch.context // max(1, batch.streams))] * batch.streams
        batch.running = Running(cls=cls, shape=shape, short=short, within=bool(self._under_way))
        self.pacer.record_launch(now, batch.running, plan)
        batch.sliced_batch = None
        if cls == LONG and plan.long.layers:
            whole_s = self._device.seconds(batch)
            each_s = whole_s / self._layers * plan.long.layers / plan.long.parts
            slices = self._device.profile.slices(whole_s, shape, each_s)
            self._under_way.append(Sliced(batch, batch.running, slices[::-1]))
            first = self._slice(self._under_way[-1])
            first.prepared = False
            return first
        return batch

    def _slice(self, sliced: Sliced) -> Batch:
        slice_s = sliced.slices.pop()
        batch = Batch([], []) if sliced.left else sliced.whole
        if not sliced.left:
            # No pause follows the last slice; with the overlap loop the next batch is decided on while it runs.
            self._under_way.remove(sliced)
        # A slice that continues a pass needs no preparation.
        batch.seconds, batch.sliced_batch, batch.running, batch.prepared = slice_s, sliced, sliced.running, True
        return batch

    def decision_time_s(self, now: float, batch: Batch) -> float:
        """See stock.Scheduler. The launch of a sliced pass lasts until shortly before its end, so this decides now."""
        running = batch.running
        if running is None or running.within or batch.seconds is not None:
            return now
        running.started = batch.begin if running.started is None else running.started
        return self._look(now, [running])

    def _look(self, now: float, running: list[Running], step: DecodeStep | None = None) -> float:
        """Look at the new requests while a batch or a decode step runs. Return the time of the next decision."""
        fresh, self._fresh = self._fresh, 0
        self.pacer.record_arrivals(now, fresh, busy=True)
        self._free_s = self.pacer.free_s(now, running, step)
        return self.pacer.decision_time_s(now, running, step)

    def finished(self, batch: Batch, now: float) -> None:
        sliced: Sliced | None = batch.sliced_batch
        self._in_pause = sliced is not None and sliced.left > 0
        running = batch.running
        assert running is not None
        if running.started is None:
            running.started = batch.begin
        if self._in_pause:
            return
        running.done, running.stock = batch.end, self._learn
        below = self._under_way[-1].running if self._under_way else None
        self.pacer.record_result(running, below, now)
        if self._memory is not None:
            self._memory.ended(batch.ending, now)
        for r in batch.ending:
            self.pacer.slo.record(now, running.cls, now - r.ready, r.slo_s)

    def _shorts(self, plan: Plan, now: float) -> Batch | None:
        """Return a batch of the picked short requests that find memory, and of later requests that still fit."""
        short, picked = self._short, plan.picked
        if self._memory is not None:
            view = list(islice(short, max(picked) + 1))
            picked = tuple(i for i in picked if self._memory.takes(view[i]))
            if not picked:
                return None
        seen = max(picked) + 1
        looked = [short.popleft() for _ in range(seen)]
        if seen == len(picked):
            taken = looked
        else:
            chosen = set(picked)
            taken = [looked[i] for i in picked]
            short.extendleft(r for i, r in reversed(list(enumerate(looked))) if i not in chosen)
        room = self._token_budget
        parts = []
        for r in taken:
            room -= r.left
            parts.append((r, r.left, r.history))
        if self._memory is None and seen >= LOOKAHEAD and seen == len(picked) and not plan.split:
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

    def _longs(self, longs: list[Request], plan: Plan, now: float, taken: int = 0) -> Batch | None:
        """Return a batch of the picked long prompts, the last one cut at the end of the token budget, less `taken`. A
        prompt starts only if the memory for the whole prompt is free."""
        room = min(plan.long.tokens or self._token_budget, self._token_budget) - taken
        memory, self._lacking = self._memory, False
        picked = [longs[i] for i in plan.long.picked]
        parts: list[tuple[Request, int, int]] = []
        ending: list[Request] = []
        for r in [*picked, *(r for r in longs if r.started >= 0.0 and r not in picked)]:
            if not room or (parts and r not in picked):
                break
            if r.started < 0.0:
                if memory is not None and not memory.takes(r):
                    self._lacking = self._lacking or not parts
                    continue
                r.started = now
            new = min(r.left, room)
            r.current_view = None
            parts.append((r, new, r.history))
            room -= new
            r.left -= new
            r.history += new
            self.waiting_tokens -= new
            if not r.left:
                ending.append(r)
                self._long.remove(r)
        return Batch(parts, ending) if parts else None

    def _reclass(self, threshold: int) -> None:
        """Split the waiting requests again by a new threshold, in order of arrival."""
        self._threshold = threshold
        everyone = sorted((*self._short, *self._long), key=lambda r: (r.ready, r.number))
        self._short, self._long = deque(), []
        for r in everyone:
            (self._short if r.started < 0.0 and r.class_tokens <= threshold else self._long).append(r)


def _long(r: Request) -> Waiting:
    seen: Waiting = r.view
    shown = r.current_view = Waiting(r.left, r.history, seen.since_s, seen.deadline_s, seen.tokens, r.started >= 0.0)
    return shown
