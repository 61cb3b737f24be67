"""Schedulers of servers that prefill and decode: SGLang's, and LAPS's.

Like SGLang's event loop, both merge the requests of a prefill batch into the running batch once the prefill batch is
launched, and run a prefill batch whenever there is one, unless decode steps go first.
"""

from __future__ import annotations

from laps_core.config import LapsConfig
from laps_core.latency.model import LatencyModel
from laps_core.length import ClassName
from laps_core.policy.decode import Decode
from laps_core.policy.types import Paused, Plan, Running, Waiting

from laps_plan.sim.decoding import decode_step
from laps_plan.sim.device import Device
from laps_plan.sim.laps import Laps
from laps_plan.sim.request import Batch, Request
from laps_plan.sim.stock import POLICIES, AtOnce
from laps_plan.sim.streams import Streams


class StockColocated(AtOnce):
    """SGLang's policies. ``interval``: decode steps after each prefill batch (``--prefill-decode-interval``);
    ``mixed``: a chunk and a decode step run as one step (``--enable-mixed-chunk``)."""

    def __init__(
        self, policy: str, chunk: int | None, device: Device, *, interval: int = 0, mixed: bool = False
    ) -> None:
        self._policy = POLICIES[policy](chunk)
        self._chunk = self._policy.budget
        self._interval, self._mixed, self._device = interval, mixed, device
        self._left = 0
        self._streams, self._joining = Streams(), list[Request]()

    @property
    def waiting_tokens(self) -> int:
        """See stock.Scheduler."""
        return self._policy.waiting_tokens

    def add(self, request: Request, now: float) -> None:
        """See stock.Scheduler."""
        self._policy.add(request, now)

    def next(self, now: float) -> Batch | float | None:
        """See stock.Scheduler."""
        streams = self._streams
        streams.join(self._joining)
        self._joining = []
        if self._left and streams.count:
            self._left -= 1
            return decode_step(streams, self._device)
        self._left = 0
        if self._mixed:
            self._policy.budget = max(1, self._chunk - streams.count)
        batch = self._policy.next(now)
        if not isinstance(batch, Batch):
            return decode_step(streams, self._device) or batch
        self._left, self._joining = self._interval, batch.ending
        return streams.step(batch) if self._mixed and streams.count else batch

    def finished(self, batch: Batch, now: float) -> None:
        """See stock.Scheduler."""
        if batch.parts:
            self._policy.finished(batch, now)


class LapsColocated(Laps):
    """LAPS, which runs decode steps and short batches in the pauses of long batches; requests of these short batches
    are decoded in the next steps."""

    def __init__(self, config: LapsConfig, chunk: int | None, model: LatencyModel, device: Device) -> None:
        super().__init__(config, chunk, model, device=device)
        self.decode = Decode(config.tbt_ms)
        self._own: Device = device
        self._streams, self._joining = Streams(), list[Request]()
        self._on_device: list[Running] = []

    def next(self, now: float) -> Batch | float | None:
        """See stock.Scheduler."""
        if self._next_after_slice is None:
            self._streams.join(self._joining)
            self._joining = []
            self.decode.set_streams(now, self._streams.count, self._streams.context)
        decision = super().next(now)
        if decision is None:
            return self._step(now)
        if isinstance(decision, Batch) and decision.running is not None and not decision.running.within:
            self._joining = decision.ending
        return decision

    def _adjust_plan(
        self, now: float, plan: Plan, shorts: list[Waiting], longs: list[Waiting], paused: Paused | None
    ) -> Plan:
        begins_s = now if paused is not None else self.pacer.free_s(now, self._on_device, self.decode.running)
        rate, sizes, apart = self.pacer.short_rate.per_s(now), self.pacer.sizes, self._lacking
        return self.decode.adjust_plan(begins_s, plan, shorts, longs, paused, sizes, apart=apart, per_s=rate)

    def _carry_out(self, now: float, plan: Plan, longs: list[Request]) -> Batch | float | None:
        step = self._step(now) if plan.decode == "first" else None
        if step is not None:
            return step
        decision = super()._carry_out(now, plan, longs)
        return decision if isinstance(decision, Batch) else self._step(now) or decision

    def _send(self, cls: ClassName, batch: Batch, plan: Plan, now: float, shorts: int = 0) -> Batch:
        carries = plan.decode == "carried" and cls == plan.order[0] and self._streams.count > 0
        rows_s = self.decode.rows_s(self.pacer.sizes)
        if carries:
            self._streams.step(batch)
            self.decode.record_launch()
        sent = super()._send(cls, batch, plan, now, shorts)
        if sent.running is not None:
            sent.running.rows_s = rows_s if carries else 0.0
            self._on_device.append(sent.running)
        return sent

    def _step(self, now: float) -> Batch | None:
        batch = decode_step(self._streams, self._own)
        if batch is not None:
            batch.within = batch.prepared = bool(self._under_way)
            self.decode.record_launch(now)
        return batch

    def decision_time_s(self, now: float, batch: Batch) -> float:
        """See stock.Scheduler."""
        if batch.parts or batch.running is not None or batch.within:
            return super().decision_time_s(now, batch)
        return self._look(now, [], self.decode.running)

    def finished(self, batch: Batch, now: float) -> None:
        """See stock.Scheduler."""
        within = batch.within
        if batch.parts or batch.running is not None:
            super().finished(batch, now)
            self._on_device = [r for r in self._on_device if r.done is None]
            running = batch.running
            within = bool(batch.parts) and running is not None and running.within
            if batch.streams and running is not None:
                self.decode.record_step(
                    batch.begin, batch.end, streams=batch.streams, within=within, rows_s=running.rows_s
                )
            if within:
                self._streams.join(batch.ending)
        else:
            below = self._under_way[-1].running if within else None
            self.decode.record_step(batch.begin, batch.end, streams=batch.streams, within=within)
            self.pacer.record_decode_step(batch.begin, batch.end, below)
        if within:
            # The paused batch continues while the next decision is made.
            self._in_pause = bool(self._under_way)
