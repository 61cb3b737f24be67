"""Telemetry for operators: totals, times to first token, and the history of pools and pressures.

To add a counter, add a field to ``Counts`` and increment it in ``router.counts``. ``http.status`` then shows the field
in /laps_status and /metrics; it also defines the gauges. Add the key to docs/ROUTER.md (a test checks this).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from laps_core.histogram import LengthCount
from laps_core.pools.choice import Choice
from laps_core.pools.controller import Move
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.pressure import BOTH, POOLS, Pool, quantile
from laps_core.protocol import Assignment
from prometheus_client import CollectorRegistry, Histogram

PREFIX = "laps_router_"
"""Prefix of every metric name."""
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 15.0, 60.0)
TTFT_KEPT = 4096
"""Samples of time to first token kept per class."""
TTFT_SPAN_S = 10.0
"""Time covered by one point of the TTFT history (seconds)."""
MOVES_KEPT = 100


def _zeros() -> dict[Pool, int]:
    return dict.fromkeys(POOLS, 0)


def _metric(text: str, label: str = "", name: str = "") -> dict[str, str]:
    """Return metadata of a total: help text, label and name of its metric. "" = no label, or the field's name."""
    return {"text": text, "label": label, "name": name}


@dataclass(slots=True)
class Counts:
    """Totals since the start, with their metrics."""

    requests: dict[Pool, int] = field(default_factory=_zeros, metadata=_metric("Requests by class", "class"))
    spilled: dict[Pool, int] = field(
        default_factory=_zeros, metadata=_metric("Requests sent to the other pool, by class", "class")
    )
    tokens: dict[Pool, int] = field(
        default_factory=_zeros, metadata=_metric("Expected new tokens by class", "class", "new_tokens")
    )
    moves: dict[Assignment, int] = field(
        default_factory=lambda: dict.fromkeys((*POOLS, BOTH), 0),
        metadata=_metric("Instances moved, by the pool they moved to", "target", "migrations"),
    )
    prefix_tokens: int = field(default=0, metadata=_metric("Tokens expected to be found in a prefix cache"))
    copied: int = field(
        default=0, metadata=_metric("Requests sent to the short pool to leave a copy of a shared prefix there")
    )
    retried: int = field(default=0, metadata=_metric("Requests sent to a second instance"))
    waited: int = field(default=0, metadata=_metric("Requests that waited in the queue"))
    failed: int = field(default=0, metadata=_metric("Requests answered 500, 502 or 504, or cut off"))
    rejected: int = field(default=0, metadata=_metric("Requests answered 503 or 429, or 408 by the queue"))
    predicted_late: int = field(
        default=0, metadata=_metric("Rejected requests whose first token was predicted after their deadline")
    )
    refused: int = field(default=0, metadata=_metric("Requests answered 4xx by the router"))
    disconnected: int = field(default=0, metadata=_metric("Requests whose client went away"))
    failed_beats: int = field(default=0, metadata=_metric("Failed iterations of the pool controller"))


class Journal:
    """Record of telemetry, with a history of ``history_s`` seconds: ``samples`` iterations of the control loop."""

    def __init__(self, history_s: float, samples: int) -> None:
        self.counts = Counts()
        self.lengths = LengthCount()
        """Requests by length, where prefixes that servers are expected to hold do not count."""
        self.moves: deque[dict[str, Any]] = deque(maxlen=MOVES_KEPT)
        """Moves, newest first, JSON-ready. Times here and in ``samples`` are seconds since 1970."""
        self.samples: deque[dict[str, Any]] = deque(maxlen=max(2, samples))
        self.registry = CollectorRegistry(auto_describe=False)
        text = "Time to first token by class (seconds)"
        histogram = Histogram(f"{PREFIX}ttft_seconds", text, ["class"], buckets=TTFT_BUCKETS_S, registry=self.registry)
        self._histograms = {p: histogram.labels(p) for p in POOLS}
        self._history_s = history_s
        self._ttft: dict[Pool, deque[tuple[float, float]]] = {p: deque(maxlen=TTFT_KEPT) for p in POOLS}
        """Monotonic time and TTFT of each first token (seconds), by class."""

    def note_choice(self, choice: Choice, tokens: int) -> None:
        """Count a request that is sent to a server; ``tokens``: all tokens of its prompts."""
        c = self.counts
        c.requests[choice.length_class] += 1
        c.tokens[choice.length_class] += choice.new_tokens
        c.prefix_tokens += choice.cached
        self.lengths.add(choice.new_tokens, max(0, tokens - choice.new_tokens))
        c.spilled[choice.length_class] += choice.why == "spill"
        c.copied += choice.why == "copy"

    def note_ttft(self, length_class: Pool, seconds: float) -> None:
        """Record one time to first token."""
        self._ttft[length_class].append((time.monotonic(), seconds))
        self._histograms[length_class].observe(seconds)

    def note_beat(
        self,
        instances: Sequence[PrefillInstance],
        pressure: dict[Pool, float],
        moves: Sequence[Move],
        others: Sequence[Move],
    ) -> None:
        """Record one sample: pool and health of each server, pool pressures, moves. Moves in ``others`` are listed but
        not counted."""
        at = round(time.time(), 3)
        for move in moves:
            self.counts.moves[move.target] += 1
        for move in (*moves, *others):
            told = {"instance": move.name, "from": move.source, "to": move.target, "reason": move.reason}
            self.moves.appendleft({"at": at, **told})
        recent = self.ttft_ms(TTFT_SPAN_S)
        self.samples.append(
            {
                "at": at,
                "pools": [i.pool[0] for i in instances],
                "healthy": [int(i.healthy) for i in instances],
                "pressure": {p: round(pressure[p], 4) for p in POOLS},
                "ttft_p90_ms": {p: recent[p]["p90"] for p in POOLS},
            }
        )

    def ttft_ms(self, window_s: float | None = None) -> dict[str, dict[str, Any]]:
        """Return, by class, the number of samples of the last ``window_s`` (seconds; None = whole history), and p50,
        p90 and p99 (ms; None without samples)."""
        start = time.monotonic() - (window_s or self._history_s)
        result: dict[str, dict[str, Any]] = {}
        for p in POOLS:
            values = [seconds for at, seconds in self._ttft[p] if at >= start]
            result[p] = {"count": len(values)}
            for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                result[p][name] = round(quantile(values, q) * 1e3, 3) if values else None
        return result
