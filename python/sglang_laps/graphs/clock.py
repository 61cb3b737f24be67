"""Measures forwards without waiting for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """``drain`` yields (tag, seconds) of the forwards that have ended since."""

    def start(self) -> Any: ...

    def stop(self, start: Any, tag: Any) -> None: ...

    def drain(self) -> Iterator[tuple[Any, float]]: ...


class HostClock:
    """For devices that compute in the calling thread."""

    def __init__(self) -> None:
        self._done: deque[tuple[Any, float]] = deque()

    def start(self) -> float:
        return time.perf_counter()

    def stop(self, start: float, tag: Any) -> None:
        self._done.append((tag, time.perf_counter() - start))

    def drain(self) -> Iterator[tuple[Any, float]]:
        while self._done:
            yield self._done.popleft()


class DeviceClock:
    """Event pairs on the current stream. Launch gaps count: they are what a replay saves."""

    def __init__(self) -> None:
        self._open: deque[tuple[Any, Any, Any]] = deque()

    def start(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def stop(self, start: Any, tag: Any) -> None:
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end.record()
        self._open.append((tag, start, end))

    def drain(self) -> Iterator[tuple[Any, float]]:
        while self._open and self._open[0][2].query():
            tag, start, end = self._open.popleft()
            yield tag, start.elapsed_time(end) / 1e3


def clock_for(device: str) -> Clock:
    """The clock of a torch device type."""
    return DeviceClock() if device == "cuda" else HostClock()
