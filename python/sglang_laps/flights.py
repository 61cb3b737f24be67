"""Batches on the device, and the books of them: device time, counters, deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laps_core.busy import BusyMeter
from laps_core.length import LONG, SHORT, LengthClass
from laps_core.scheduling.pacer import Pacer
from laps_core.scheduling.plan import Launch

from sglang_laps.status import Series, Totals

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


@dataclass(slots=True)
class Flight:
    """A batch on the device. Times are seconds of ``time.perf_counter``."""

    launch: Launch
    batch: ScheduleBatch
    reqs: list[Req]
    shape: list[tuple[int, int]]
    """(new, history) tokens of each request."""
    cut: Req | None
    """The prompt that goes on after it."""
    short: Sequence[int] = ()
    """Which requests of a long batch are short."""
    layers: int = 0
    """Of a slice; 0 = in one piece."""
    within: bool = False
    """It runs while another is paused."""
    started: float | None = None
    """When it went to the device."""
    done: float | None = None
    """When its device work was done; None = known only when its result is processed."""
    paused_s: float = 0.0
    """Device time that others had meanwhile."""
    replays: int = 0


class Books:
    """What the batches of one scheduler took, and whom they served."""

    def __init__(self, pacer: Pacer, series: Series | None, now: float) -> None:
        self.busy = BusyMeter()
        self.totals = {SHORT: Totals(), LONG: Totals()}
        self._pacer = pacer
        self._series = series
        self._last_end = now

    def ended(self, flight: Flight, paused: Flight | None, now: float) -> None:
        """The result of a batch is processed. `paused`: the one that waits for it."""
        end = flight.done or now
        # With two batches in flight the second starts on the device when the first ends.
        sent = end if flight.started is None else flight.started
        begin = sent if flight.within else max(sent, self._last_end)
        if not flight.within:
            self._last_end = end
            self.busy.add(begin, end)
        elif paused is not None:
            # A batch below that one is paused for both.
            paused.paused_s += end - begin
        self._pacer.finished(
            flight.launch, begin, end, now, flight.shape,
            stock=flight.replays == 0, paused_s=flight.paused_s, within=flight.within,
        )  # fmt: skip
        self._count(flight, now, max(0.0, end - begin - flight.paused_s))

    def _count(self, flight: Flight, now: float, busy_s: float) -> None:
        """Both classes, after a batch that had the device for `busy_s`."""
        short = range(len(flight.shape)) if flight.launch.cls is SHORT else set(flight.short)
        of: dict[LengthClass, list[int]] = {SHORT: [], LONG: []}
        for i, (new, _) in enumerate(flight.shape):
            cls, req = SHORT if i in short else LONG, flight.reqs[i]
            of[cls].append(new)
            if req is not flight.cut:
                self._pacer.slo.record(now, cls.value, now - req.laps_tag.arrival, req.laps_tag.slo_s)
        for cls, tokens in of.items():
            if not tokens:
                continue
            mine = cls is flight.launch.cls
            done = Totals(int(mine), len(tokens), sum(tokens), busy_s if mine else 0.0)
            self.totals[cls].add(done)
            if self._series is not None:
                self._series.count(cls.value, done)
