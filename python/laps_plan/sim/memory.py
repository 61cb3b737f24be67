"""KV memory of a simulated prefill server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from laps_plan.sim.request import Request


class Memory:
    """A prompt holds its tokens from its start until a decode server has fetched them."""

    def __init__(self, tokens: int, fetch_s: float = 0.0) -> None:
        """``tokens``: of the pool. ``fetch_s``: from the end of a prompt until its tokens are free (seconds)."""
        self.tokens, self._fetch_s = tokens, fetch_s
        self.free = tokens
        self._leaving: deque[tuple[float, int, int]] = deque()
        """(when, tokens, those that count for its class) of prompts that are being fetched."""

    def settle(self, now: float) -> None:
        """Free what has been fetched by now."""
        while self._leaving and self._leaving[0][0] <= now:
            self.free += self._leaving.popleft()[1]

    def takes(self, request: Request) -> bool:
        """Reserve memory for a whole prompt; False if it does not fit.

        Raises ValueError for a prompt that an empty pool does not hold.
        """
        if request.prompt > self.tokens:
            raise ValueError(f"a prompt of {request.prompt} tokens, memory for {self.tokens}")
        if request.prompt > self.free:
            return False
        self.free -= request.prompt
        return True

    def ended(self, requests: Iterable[Request], now: float) -> None:
        """The prefill of these has ended."""
        self._leaving.extend((now + self._fetch_s, r.prompt, r.class_tokens) for r in requests)

    def holds_more_than(self, threshold: int) -> bool:
        """Return True if a long prompt is being fetched: one of more than ``threshold`` tokens by its class."""
        return any(tokens > threshold for _, _, tokens in self._leaving)

    @property
    def fetched_s(self) -> float | None:
        """When memory is freed next; None if none is being fetched."""
        return self._leaving[0][0] if self._leaving else None
