"""Quotes as Prometheus series."""

from __future__ import annotations

from functools import partial
from typing import Any

_GAUGES = (
    ("ttft_ms", "quote_seconds", "Quoted time to first token of a median request."),
    ("high_ms", "quote_high_seconds", "Quoted time to first token that one request in ten exceeds."),
)
"""Gauges by class: key of a quote, name, help."""


class QuoteSeries:
    """Gauges of the quotes for median requests, and counters of the outcomes of quotes."""

    def __init__(self, labels: dict[str, str]) -> None:
        """`labels`: labels of every series."""
        from prometheus_client import Counter, Gauge

        gauge, names = partial(Gauge, multiprocess_mode="mostrecent"), [*labels, "class"]
        self._labels = labels
        self._gauges = {key: gauge(f"sglang:laps_{name}", text, names) for key, name, text in _GAUGES}
        self._outcomes = Counter(
            "sglang:laps_quote_outcomes",
            "First tokens inside, below and above their quoted interval.",
            [*names, "side"],
        )
        self._beyond = Counter(
            "sglang:laps_quote_beyond_bound", "First tokens that came later than the bound they were quoted.", [*labels]
        )
        self._counted: dict[tuple[str, ...], int] = {}

    def show(self, quotes: dict[str, Any] | None) -> None:
        """Update gauges and counters from the entry ``quotes`` of a status."""
        if not quotes:
            return
        for cls, one in quotes["typical"].items():
            for key, gauge in self._gauges.items():
                gauge.labels(**self._labels, **{"class": cls}).set(one[key] / 1e3)
        for cls, sides in quotes["outcomes"].items():
            for side, count in sides.items():
                counter = self._outcomes.labels(**self._labels, **{"class": cls, "side": side})
                counter.inc(self._more((cls, side), count))
        self._beyond.labels(**self._labels).inc(self._more(("bound",), quotes["beyond_bound"]))

    def _more(self, key: tuple[str, ...], count: int) -> int:
        before, self._counted[key] = self._counted.get(key, 0), count
        return count - before
