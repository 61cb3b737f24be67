"""Moments on the stream that forward passes run on, where a device runs behind the host."""

from __future__ import annotations

from typing import Any

Mark = Any
"""An event of the device."""


class Marks:
    """Makes marks, and tells the time between two that the device has passed."""

    def __init__(self, device: Any, stream: Any) -> None:
        """`device`: a module such as ``torch.cuda``. `stream`: None is the current one."""
        self._device, self._stream = device, stream

    def now(self) -> Mark:
        """A mark that the device passes once it has done all that it was given."""
        mark = self._device.Event(enable_timing=True)
        mark.record(*(() if self._stream is None else (self._stream,)))
        return mark

    @staticmethod
    def seconds(begin: Mark, end: Mark) -> float:
        """Time between two marks (seconds). Waits until the device has passed the second: a result may be there before
        it, by a few microseconds."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
