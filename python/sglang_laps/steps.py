"""Measured times of steps: events on the device, and the decode steps of a server that prefills and decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_laps.core import LapsCore
from sglang_laps.group import Group


class Marks:
    """Events on the stream of forward passes of a device that runs behind the host, and the time between two events."""

    def __init__(self, device: Any, stream: Any) -> None:
        """`device`: a module such as ``torch.cuda``. `stream`: None = the current stream."""
        self._device, self._stream = device, stream

    def now(self) -> Any:
        """Return a mark that the device passes once it has done all work submitted so far."""
        mark = self._device.Event(enable_timing=True)
        mark.record(*(() if self._stream is None else (self._stream,)))
        return mark

    @staticmethod
    def seconds(begin: Any, end: Any) -> float:
        """Return the time between two marks (seconds). Wait until the device has passed `end`, because a result can be
        available a few microseconds before `end`."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@dataclass(slots=True)
class Step:
    """A decode step on the device. Times are seconds of ``time.perf_counter``."""

    streams: int
    within: bool
    beside: bool
    """Other data-parallel ranks prefilled in this step, so it took as long as their prefill."""
    started: float
    done: float | None = None
    """None until the result of the step is there."""
    marks: tuple[Any, Any] | None = None
    """Device events at start and end of the step; None if the host sees both."""


class Steps:
    """Decode steps of one scheduler, from launch to result."""

    def __init__(self, core: LapsCore, marks: Marks | None, ended: Callable[[Step], None], group: Group | None) -> None:
        """Measure steps. `marks`: None if a forward pass has ended when its call returns. `ended`: called with each
        step in which no other rank prefilled. `group`: ranks that plan together, or None."""
        self._core, self._marks, self._ended, self._group = core, marks, ended, group
        self._under_way: dict[int, Step] = {}

    @contextmanager
    def running(self, batch: Any) -> Iterator[None]:
        decode, beside = self._core.decode, bool(batch.reqs) and batch.is_extend_in_batch
        if self._group is not None:
            self._group.start_step(prefills=beside)
        # If other ranks prefill, SGLang can run this step as a prefill of one token for each request.
        if decode is None or not (beside or batch.forward_mode.is_decode()):
            yield
            return
        begin = self._marks and self._marks.now()
        step = Step(len(batch.reqs), bool(self._core.under_way), beside, time.perf_counter())
        decode.record_launch(step.started)
        yield
        if self._marks is None:
            step.done = time.perf_counter()
        else:
            step.marks = begin, self._marks.now()
        self._under_way[batch.forward_iter] = step

    def record_result(self, batch: Any, result: Any) -> None:
        """Record the decode step of this batch; call it just before the batch's result is processed."""
        step = self._under_way.pop(batch.forward_iter, None)
        if step is None:
            return
        if step.done is None:
            if result.copy_done is not None:
                # SGLang's method waits for the same event first.
                result.copy_done.synchronize()
            step.done = time.perf_counter()
            if self._marks is not None and step.marks is not None:
                step.marks[1].synchronize()
                step.started = step.done - self._marks.seconds(*step.marks)
        if not step.beside:
            self._ended(step)
        self._core.record_decode_step(
            step.started, step.done, streams=step.streams, within=step.within, beside=step.beside
        )
