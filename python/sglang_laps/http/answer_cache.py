"""Cache of an answer that interrupts a scheduler, for callers that accept a slightly old answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

OLDEST_S = 10.0
"""Greatest age of an answer from the cache (seconds)."""

T = TypeVar("T")


class AnswerCache(Generic[T]):
    """Cache that asks once at a time for all callers that accept an old answer."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._last: tuple[T, float] | None = None
        """Latest answer, and the time when the answer came."""
        self._asking: asyncio.Task[T] | None = None

    async def get(self, oldest_s: float = 0.0) -> tuple[T, float]:
        """Return an answer and its age (seconds). An answer of at most ``oldest_s`` can come from the cache."""
        if not oldest_s > 0.0:
            return await self._new(), 0.0
        if self._last is not None:
            answer, at = self._last
            age_s = self._clock() - at
            if age_s <= min(oldest_s, OLDEST_S):
                return answer, age_s
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._new())
        # The caller that asked first may be cancelled; other callers still wait.
        return await asyncio.shield(self._asking), 0.0

    async def _new(self) -> T:
        answer = await self._ask()
        self._last = answer, self._clock()
        return answer
