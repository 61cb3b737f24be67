"""What requests leave behind: totals, and the times of their first tokens."""

from __future__ import annotations

import time

from laps_core.pools.pressure import POOLS, Pool
from prometheus_client import CollectorRegistry, Histogram

from ..pools.choice import Choice
from .counts import Counts
from .ttft import TtftWindow

PREFIX = "laps_router_"
"""Begins the name of every metric."""
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 15.0, 60.0)


class Journal:
    """First tokens are recorded as they come; all else is counted, and read off when somebody asks."""

    def __init__(self, history_s: float) -> None:
        self.counts = Counts()
        self.ttft = TtftWindow(history_s)
        self.registry = CollectorRegistry(auto_describe=False)
        histogram = Histogram(
            f"{PREFIX}ttft_seconds",
            "Time to first token by class (seconds)",
            ["class"],
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._by_class = {p: histogram.labels(p) for p in POOLS}

    def note_choice(self, choice: Choice, tokens: int) -> None:
        """Count a request of ``tokens`` in all that found its place."""
        c = self.counts
        c.requests[choice.length_class] += 1
        c.tokens[choice.length_class] += choice.new_tokens
        c.prefix_tokens += tokens - choice.new_tokens
        c.spilled[choice.length_class] += choice.spilled
        c.copied += choice.copies

    def note_ttft(self, length_class: Pool, seconds: float) -> None:
        """Note one first token."""
        self.ttft.add(time.monotonic(), length_class, seconds)
        self._by_class[length_class].observe(seconds)
