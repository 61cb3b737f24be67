"""Event loop whose clock skips all waiting, so that hours of timers pass at once, equally on every machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _SkippingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits, and nothing will ever happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop for timers only; a task that waits for real input never ends."""

    def __init__(self) -> None:
        self._skipping_selector = _SkippingSelector()
        super().__init__(self._skipping_selector)

    def time(self) -> float:
        """Return the virtual time (seconds)."""
        return self._skipping_selector.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run like asyncio.run, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
