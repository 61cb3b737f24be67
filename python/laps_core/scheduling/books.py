"""Batches on the device, what each had of it, and how busy it was."""

from __future__ import annotations

import math

from laps_core.scheduling.pacer import Pacer
from laps_core.scheduling.plan import Running

HORIZON_S = 5.0
"""Time constant of the busy share (seconds)."""


class BusyMeter:
    """Exponentially weighted busy share of one device (0..1)."""

    def __init__(self) -> None:
        self._share = 0.0
        self._at = -math.inf

    def add(self, begin: float, end: float) -> None:
        """Note a busy interval; intervals come in order and do not overlap (seconds)."""
        keep = math.exp(-max(0.0, end - begin) / HORIZON_S)
        self._share = self.share(begin) * keep + (1.0 - keep)
        self._at = end

    def share(self, now: float) -> float:
        """Busy share as of `now` (seconds). Reading changes nothing."""
        return self._share * math.exp(-max(0.0, now - self._at) / HORIZON_S)


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
        self._pacer.finished(batch, begin, end, now, took_s)
        return took_s
