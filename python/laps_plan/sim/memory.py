"""KV memory of a simulated prefill server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from laps_plan.sim.request import Request


class Memory:
    """KV memory pool: a prompt holds its tokens from its start until a decode server has fetched them."""

    def __init__(self, tokens: int, fetch_s: float = 0.0) -> None:
        """``tokens``: size of the pool. ``fetch_s``: time from the end of a prefill until its tokens are free."""
        self.tokens, self._fetch_s = tokens, fetch_s
        self.free = tokens
        self._leaving: deque[tuple[float, int, int]] = deque()
        """(time when freed, tokens, tokens that count for its class) of each prompt that is being fetched."""

    def settle(self, now: float) -> None:
        """Free the tokens of prompts that have been fetched by ``now``."""
        while self._leaving and self._leaving[0][0] <= now:
            self.free += self._leaving.popleft()[1]

    def takes(self, request: Request) -> bool:
        """Reserve memory for a whole prompt; return False if it does not fit.

        Raises ValueError for a prompt that is larger than the whole pool.
        """
        if request.prompt > self.tokens:
            raise ValueError(f"a prompt of {request.prompt} tokens, memory for {self.tokens}")
        if request.prompt > self.free:
            return False
        self.free -= request.prompt
        return True

    def ended(self, requests: Iterable[Request], now: float) -> None:
        """Start to fetch the requests whose prefill has ended."""
        self._leaving.extend((now + self._fetch_s, r.prompt, r.class_tokens) for r in requests)

    def holds_more_than(self, threshold: int) -> bool:
        """Return True if a long prompt is being fetched: a prompt of more than ``threshold`` tokens by its class."""
        return any(tokens > threshold for _, _, tokens in self._leaving)

    @property
    def fetched_s(self) -> float | None:
        """Return the time at which memory is freed next; None if no prompt is being fetched."""
        return self._leaving[0][0] if self._leaving else None
