"""Batches on the device, and what each had of it."""

from __future__ import annotations

from dataclasses import dataclass

from laps_core.busy import BusyMeter
from laps_core.scheduling.pacer import Pacer
from laps_core.scheduling.plan import Launch


@dataclass(slots=True, kw_only=True)
class Running:
    """A batch on the device. Times are seconds of one clock."""

    launch: Launch
    shape: list[tuple[int, int]]
    """(new, history) tokens of each request."""
    within: bool = False
    """It runs while another is paused."""
    started: float | None = None
    """When it went to the device."""
    done: float | None = None
    """When its device work was done; None = known only when its result is processed."""
    paused_s: float = 0.0
    """Device time that others had meanwhile."""
    stock: bool = True
    """The latency model may learn from it: it was not replayed from a graph of LAPS."""


class Books:
    """Enters each batch that has ended: its time into the policy, the device's into ``busy``."""

    def __init__(self, pacer: Pacer, now: float) -> None:
        self.busy = BusyMeter()
        self._pacer = pacer
        self._last_end = now

    def ended(self, batch: Running, below: Running | None, now: float) -> float:
        """The result of a batch is there; the device time that it had (seconds). `below`: what is paused for it."""
        end = batch.done or now
        # With two batches in flight the second starts on the device when the first ends.
        sent = end if batch.started is None else batch.started
        begin = sent if batch.within else max(sent, self._last_end)
        if not batch.within:
            self._last_end = end
            self.busy.add(begin, end)
        elif below is not None:
            # A batch below that one is paused for both.
            below.paused_s += end - begin
        took_s = max(0.0, end - begin - batch.paused_s)
        self._pacer.finished(batch.launch, begin, end, now, batch.shape, took_s, stock=batch.stock, within=batch.within)
        return took_s
