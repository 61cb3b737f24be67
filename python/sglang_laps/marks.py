"""Device events on the stream of forward passes, for devices that run behind the host."""

from __future__ import annotations

from typing import Any

Mark = Any
"""A device event."""


class Marks:
    """Device events on one stream, and the time between two events."""

    def __init__(self, device: Any, stream: Any) -> None:
        """`device`: a module such as ``torch.cuda``. `stream`: None = the current stream."""
        self._device, self._stream = device, stream

    def now(self) -> Mark:
        """Return a mark that the device passes once it has done all work submitted so far."""
        mark = self._device.Event(enable_timing=True)
        mark.record(*(() if self._stream is None else (self._stream,)))
        return mark

    @staticmethod
    def seconds(begin: Mark, end: Mark) -> float:
        """Return the time between two marks (seconds). Wait until the device has passed `end`, because a result can be
        available a few microseconds before `end`."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
