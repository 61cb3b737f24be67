"""A scheduler that no server can have: it knows each size and cost, and is as unfair as suits its aim.

What policies are compared with (``benchmark.limit``). It sweeps over what a short request counts against a long one.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import itemgetter

from laps_core.length import new_tokens

from laps_plan.profile import Profile
from laps_plan.sim.device import Device
from laps_plan.sim.engine import Events, Server, simulate
from laps_plan.sim.fleet import Single
from laps_plan.sim.metrics import Outcome
from laps_plan.sim.request import Batch, Request
from laps_plan.traffic.streams import Stream

HOPELESS = 1e-6
"""Factor on the weight of a request that is too late for the aim."""
Entry = tuple[float, int, Request]
"""(key, number, request) of one that waits; smallest first."""
_key = itemgetter(0, 1)


@dataclass(frozen=True, kw_only=True)
class Aim:
    """Aim of an oracle: the least sum of weight x time over the requests."""

    boost: float = 1.0
    """Weight of a short request over that of a long one."""
    power: float = 0.0
    """A request counts (time alone)^-power: 0 = least remaining work first; 1 = smallest size x remaining work first,
    which is the best known for mean slowdown."""
    ahead: float = 2.0
    """Each request that waits stands for so many that a saved step serves sooner; more of them make fuller batches."""
    gap_s: float = 0.0
    """Between two preemptions (seconds)."""
    late_s: tuple[float, float] = (math.inf, math.inf)
    """A short, a long request that can no longer have its first token so soon goes behind all others: a quantile does
    not ask by how much the worst are late (seconds after arrival)."""


@dataclass(slots=True, eq=False)
class Step:
    """A batch that has begun, or is about to."""

    parts: list[tuple[Request, int, int]]
    ending: list[Request]
    count: float
    """Sum of the weights of its requests."""
    seconds: float
    """Until the last of its requests is done, were they alone: the step, and what is left of a prompt that is cut."""
    left_s: float = 0.0
    """Device time left of the step (seconds)."""
    slice_s: float = math.inf
    """Time between two pauses (seconds)."""

    def ran(self, seconds: float) -> None:
        """So much of it is done."""
        self.left_s -= seconds
        self.seconds -= seconds


class Oracle:
    """One server's scheduler. ``slice_s``: where LAPS would pause a long batch; None = anywhere, see ``Interrupted``.

    A pause costs nothing but the fixed time of the step that it lets in, and any number of batches may be paused.
    Requests run in order of what they count per second of their work. One that waits joins a batch where the step saved
    is worth more than the delay of those in it; a batch preempts where those in it gain more than all others lose.
    """

    def __init__(self, aim: Aim, chunk: int, device: Device, *, threshold: int, slice_s: float | None = None) -> None:
        self._aim, self._chunk, self._device, self._threshold = aim, chunk, device, threshold
        self._slice_s = slice_s
        p = device.profile
        c = p.coefficients
        self._terms = c.alpha, c.linear, c.gamma_r, c.per_request
        self._flat = c.flat
        self._fixed_s = c.step_s + p.step_host_s + p.poll_s
        self._line: list[Entry] = []
        self._counted = 0.0
        self._due: list[tuple[float, int, Request]] = []
        self._paused: list[Step] = []
        self._settled: Step | None = None
        """Step that goes on until a request comes or a step ends."""
        self.running: Batch | None = None
        self._preempted_s = -math.inf
        self._preempting = False
        self.waiting_tokens = 0

    def add(self, request: Request, now: float) -> None:
        """See stock.Scheduler."""
        short = new_tokens(request.prompt, request.history, "uncached") <= self._threshold
        alone_s = self._fixed_s + self._work_s(request)
        count = (self._aim.boost if short else 1.0) * alone_s**-self._aim.power
        request.view = count
        self._settled = None
        self.waiting_tokens += request.left
        self._enter(request)
        late_s = self._aim.late_s[0 if short else 1]
        if late_s < math.inf:
            heapq.heappush(self._due, (now + late_s - alone_s, request.number, request))

    def next(self, now: float) -> Batch | float | None:
        """See stock.Scheduler."""
        while self._due and self._due[0][0] < now:
            self._give_up(heapq.heappop(self._due)[2])
        if self._settled is not None:
            return self._go_on(self._settled, math.inf)
        paused = min(self._paused, key=lambda s: s.seconds / s.count, default=None)
        step = self._batch(paused) if self._line else None
        opens_s = self._preempted_s + self._aim.gap_s
        if step is not None and (paused is None or now >= opens_s):
            return self._start(step, now, preempts=paused is not None)
        if paused is None:
            return None
        if step is None:
            self._settled = paused
        return self._go_on(paused, math.inf if step is None else opens_s - now)

    def finished(self, batch: Batch, now: float) -> None:
        """See stock.Scheduler."""
        self.running = None
        step: Step = batch.whole
        step.ran(batch.end - batch.begin)
        if not batch.parts:
            self._paused.append(step)
            return
        self._settled = None
        if self._preempting:
            self._preempted_s, self._preempting = now, False
        for request, _, _ in step.parts:
            if request.left:
                self._enter(request)

    def interrupted(self, now: float) -> float:
        """Pause the running batch; return how long it would have run on (seconds)."""
        batch, self.running = self.running, None
        assert batch is not None
        step: Step = batch.whole
        left = batch.end - now
        step.ran((step.left_s if batch.seconds is None else batch.seconds) - left)
        self._paused.append(step)
        return left

    # -- who waits

    def _work_s(self, r: Request) -> float:
        """Return the work left of a request, in shared steps (seconds); later chunks count the fixed time of a step."""
        more = max(0, -(-r.left // self._chunk) - 1)
        again_s = more * (self._fixed_s + self._terms[2] * (r.history + 0.5 * r.left)) if more else 0.0
        return self._beside_s(r.left, r.history) + again_s

    def _beside_s(self, new: int, old: int, tokens: int = 0) -> float:
        """By how much a step of so many ``tokens`` grows with these new ones on a history (seconds)."""
        alpha, linear, gamma_r, per_request = self._terms
        counted = max(0, tokens + new - self._flat) - max(0, tokens - self._flat)
        return alpha * new * (new + 2 * old) + linear * counted + gamma_r * old + per_request

    def _enter(self, r: Request) -> None:
        insort(self._line, ((self._fixed_s + self._work_s(r)) / r.view, r.number, r), key=_key)
        self._counted += r.view

    def _leave(self, r: Request) -> bool:
        """Remove a request from the line; return False if it was not there."""
        at = bisect_left(self._line, ((self._fixed_s + self._work_s(r)) / r.view, r.number), key=_key)
        if at == len(self._line) or self._line[at][2] is not r:
            return False
        del self._line[at]
        self._counted = max(0.0, self._counted - r.view) if self._line else 0.0
        return True

    def _give_up(self, r: Request) -> None:
        if r.left and self._leave(r):
            r.view *= HOPELESS
            self._enter(r)
            self._settled = None

    # -- batches

    def _batch(self, paused: Step | None) -> Step | None:
        """The best batch of those that wait; None where it is better to go on with what is ``paused``."""
        room, took, count, n = self._chunk, self._fixed_s, 0.0, 0
        worth = self._fixed_s * self._aim.ahead
        rest_s = 0.0
        for _, _, r in self._line:
            new = min(r.left, room)
            work_s = self._beside_s(new, r.history, self._chunk - room)
            # Only a prompt of its own is cut: the piece of another would be a first token to nobody.
            if n and (new < r.left or count * work_s > worth * (self._counted - count)):
                break
            took += work_s
            count += r.view
            room -= new
            n += 1
            if new < r.left:
                rest_s = self._work_s(r) - work_s
            if not room:
                break
        if paused and count * paused.seconds <= paused.count * (took + rest_s) + worth * (self._counted - count):
            return None
        parts = [(r, min(r.left, self._chunk), r.history) for _, _, r in self._line[:n]]
        return Step(parts, [r for r, new, _ in parts if new == r.left], count, took + rest_s, took)

    def _start(self, step: Step, now: float, *, preempts: bool) -> Batch:
        del self._line[: len(step.parts)]
        self._counted = max(0.0, self._counted - step.count) if self._line else 0.0
        long = False
        for r, new, _ in step.parts:
            long |= r.prompt - r.cached > self._threshold
            if r.started < 0.0:
                r.started = now
            r.left -= new
            r.history += new
            self.waiting_tokens -= new
        self._preempting |= preempts
        batch = Batch(step.parts, step.ending)
        whole_s = self._device.seconds(batch)
        # As long as it takes, not as long as such a step takes on average.
        step.seconds += whole_s - step.left_s
        step.left_s = whole_s
        if long and self._slice_s is not None and whole_s > 2.0 * self._slice_s:
            layers = self._device.profile.layers
            each = max(1, min(layers, int(self._slice_s * layers / whole_s)))
            step.slice_s = min(whole_s / -(-layers // each), self._slice_s)
        if long:
            return self._go_on(step, math.inf)
        batch.whole = step
        self.running = batch
        return batch

    def _go_on(self, step: Step, until_s: float) -> Batch:
        """Run it for a slice, or until then if it may be paused at any moment."""
        if step in self._paused:
            self._paused.remove(step)
        run_s = step.slice_s if self._slice_s is not None else max(until_s, 1e-4)
        ends = step.left_s <= run_s * (1.0 + 1e-9)
        batch = Batch(step.parts, step.ending) if ends else Batch([], [])
        batch.seconds, batch.whole = min(run_s, step.left_s), step
        self.running = batch
        return batch


class Interrupted(Server):
    """A server whose scheduler is asked whenever a request comes: what runs is paused at that moment, at no cost."""

    scheduler: Oracle

    def _ready(self, now: float, request: Request) -> None:
        super()._ready(now, request)
        batch = self.scheduler.running
        if batch is not None and batch.begin <= now < batch.end:
            self.busy_s -= self.scheduler.interrupted(now)
            self._again(now, None)

    def _done(self, now: float, batch: Batch) -> None:
        if batch is self.scheduler.running:
            super()._done(now, batch)


def run(
    aim: Aim, workload: Stream, profile: Profile, *, chunk: int, slice_s: float | None, threshold: int, seed: int = 0
) -> Outcome:
    """Simulate ``workload`` on one server; ``slice_s`` None: steps can be paused at any moment."""
    events, device = Events(), Device(profile, seed=seed * 1009)
    oracle = Oracle(aim, chunk, device, threshold=threshold, slice_s=slice_s)
    server = (Interrupted if slice_s is None else Server)("oracle", oracle, device, events)
    return simulate(workload, Single([server]), events, chunk=chunk)
