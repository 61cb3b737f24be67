"""LAPS scheduler of the simulator that quotes each request and keeps the outcome of each quote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from laps_core.config import LapsConfig
from laps_core.latency.model import LatencyModel
from laps_core.length import ClassName, classify
from laps_core.receipts.calibration import Side
from laps_core.receipts.quoter import Device as Seen
from laps_core.receipts.quoter import Quoted, Quoter

from laps_plan.profile import Profile
from laps_plan.sim.device import Device
from laps_plan.sim.engine import Events, Server, simulate
from laps_plan.sim.fleet import Single
from laps_plan.sim.laps import Laps
from laps_plan.sim.request import Batch, Request
from laps_plan.traffic.streams import Stream


class Outcome(NamedTuple):
    """A quote and its outcome (seconds)."""

    cls: ClassName
    at_s: float
    measured_s: float
    quoted: Quoted
    side: Side


class QuotedLaps(Laps):
    """Laps with quotes. Like a server, it knows of the device only when a batch was sent, and the predicted time of
    that batch."""

    def __init__(self, config: LapsConfig, chunk: int | None, model: LatencyModel, **how: Any) -> None:
        super().__init__(config, chunk, model, **how)
        self.quoter = Quoter(config, self.pacer, 0.0)
        self.outcomes: list[Outcome] = []
        self._quoted: dict[int, Quoted] = {}
        self._free_s = -math.inf

    def add(self, request: Request, now: float) -> None:
        super().add(request, now)
        cls = classify(request.class_tokens, self._threshold)
        due = request.slo_s is not None
        quoted = self.quoter.quote_arrival(
            now, request.number, request.left, request.history, cls, self.device(now), due=due
        )
        if quoted is not None:
            self._quoted[request.number] = quoted

    def device(self, now: float) -> Seen:
        """Return the predicted remaining times of the running batch and of each paused batch."""
        left_s = max(0.0, self._free_s - now)
        return Seen(left_s, tuple(sum(s.slices) for s in self._under_way))

    def next(self, now: float) -> Batch | float | None:
        said = super().next(now)
        if isinstance(said, Batch):
            shape = [(new, old) for _, new, old in said.parts]
            took_s = self.pacer.model.predict(shape) or 0.0 if said.seconds is None else said.seconds
            self._free_s = max(self._free_s, now) + took_s
        return said

    def finished(self, batch: Batch, now: float) -> None:
        super().finished(batch, now)
        if batch.running is not None and batch.sliced_batch is None:
            self.quoter.record_batch(batch.running.cls, batch.end - batch.begin)
        for r in batch.ending:
            quoted = self._quoted.pop(r.number, None)
            if quoted is not None:
                side = self.quoter.record_outcome(now, quoted)
                self.outcomes.append(Outcome(quoted.cls, r.ready, now - r.ready, quoted, side))

    def _send(self, cls: ClassName, batch: Batch, *how: Any, **more: Any) -> Batch:
        for r, _, _ in batch.parts:
            self.quoter.record_launch(r.number, r.left, r.history)
        return super()._send(cls, batch, *how, **more)


def run(
    workload: Stream,
    profile: Profile,
    *,
    chunk: int | None = 8192,
    knobs: Mapping[str, Any] | None = None,
    learn: bool = False,
    overlap: bool = False,
    seed: int = 0,
) -> list[Outcome]:
    """Simulate one server. Return its quotes and their outcomes, in order of the answers. `learn`: the latency model is
    fitted to the steps, as on a server that has just started."""
    device = Device(profile, seed=seed)
    config = LapsConfig(**(knobs or {}))
    scheduler = QuotedLaps(config, chunk, profile.model(), learn=learn, device=device)
    events = Events()
    simulate(workload, Single([Server("quoted", scheduler, device, events, overlap=overlap)]), events, chunk=chunk)
    return scheduler.outcomes


def inside(outcomes: list[Outcome], cls: ClassName | None = None) -> float:
    """Return the share of outcomes (of a class) inside their quoted interval; NaN if there are no outcomes."""
    sides = [o.side for o in outcomes if cls in (None, o.cls)]
    return sides.count("inside") / len(sides) if sides else math.nan
