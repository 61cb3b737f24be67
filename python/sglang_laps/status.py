"""What a prefill server says of its LAPS scheduler: one snapshot, told over HTTP and as Prometheus series."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laps_core.protocol import Load, Status, read_status

from sglang_laps import __version__

PERIOD_S = 0.5
"""The Prometheus gauges are set no more often than this."""


@dataclass(slots=True)
class Totals:
    """Since-start counters of one class."""

    batches: int = 0
    requests: int = 0
    tokens: int = 0
    busy_s: float = 0.0

    def add(self, other: Totals) -> None:
        """Add up."""
        self.batches += other.batches
        self.requests += other.requests
        self.tokens += other.tokens
        self.busy_s += other.busy_s


def merge(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One status from those of the data-parallel ranks."""
    if not ranks:
        return Status(enabled=False, version=__version__).as_dict()
    first = dict(ranks[0])
    head = read_status(first)
    if len(ranks) == 1 or not head.enabled:
        return first
    load = Load.of_ranks([x for r in ranks if (x := read_status(r).load) is not None])
    first.update(Status(enabled=True, version=head.version, load=load).as_dict())
    for part, how in (("queues", _add_or_max), ("totals", _add_or_max)):
        first[part] = {cls: how([r[part][cls] for r in ranks]) for cls in first[part]}
    first["ranks"] = list(ranks)
    return first


def _add_or_max(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: (max if key.startswith("oldest") else sum)(e[key] for e in entries) for key in entries[0]}


class Series:
    """The same snapshot as Prometheus series, in the registry that SGLang's --enable-metrics serves."""

    def __init__(self, labels: dict[str, str]) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR first; prometheus_client reads it when imported.
        from prometheus_client import Counter, Gauge

        names, by_class = list(labels), [*labels, "class"]
        self._labels = labels
        self._told_s: float | None = None

        def gauge(name: str, text: str, per_class: bool = False) -> Gauge:
            return Gauge(f"sglang:laps_{name}", text, by_class if per_class else names, multiprocess_mode="mostrecent")

        self._gauges = {
            "depth": gauge("queue_depth", "Waiting requests.", True),
            "waiting_tokens": gauge("queue_tokens", "Waiting new tokens.", True),
            "oldest_wait_s": gauge("queue_oldest_wait_seconds", "Age of the oldest waiting request.", True),
        }
        self._credit = gauge("long_credit_seconds", "Device time that the long prompt waiting longest is owed.")
        self._parked = gauge("parked", "Long prompts between two of their chunks.")
        self._threshold = gauge("length_threshold_tokens", "Longest short request.")
        self._busy = gauge("busy_share", "Share of the last seconds the device was busy.")
        self._counters = {
            name: Counter(f"sglang:laps_{name}", text, by_class)
            for name, text in (
                ("batches", "Prefill batches."),
                ("requests", "Requests prefilled (chunks of one count once each)."),
                ("tokens", "New tokens prefilled."),
                ("busy_s", "Device seconds."),
            )
        }

    def tell(self, now: float, status: Callable[[], dict[str, Any]], done: Mapping[str, Totals]) -> None:
        """Count what was `done` for each class; set the gauges where PERIOD_S has passed since."""
        for cls, total in done.items():
            self.count(cls, total)
        if self._told_s is None or now - self._told_s >= PERIOD_S:
            self._told_s = now
            self.show(status())

    def show(self, status: dict[str, Any]) -> None:
        """Set the gauges from a snapshot."""
        for cls, queue in status["queues"].items():
            for key, gauge in self._gauges.items():
                gauge.labels(**self._labels, **{"class": cls}).set(queue[key])
        self._credit.labels(**self._labels).set(status["fairness"]["credit_s"])
        self._parked.labels(**self._labels).set(status["in_progress"])
        self._threshold.labels(**self._labels).set(status["threshold"]["tokens"])
        load = read_status(status).load
        self._busy.labels(**self._labels).set(0.0 if load is None else load.busy_share)

    def count(self, cls: str, done: Totals) -> None:
        """Add one batch to the counters."""
        for name, value in asdict(done).items():
            self._counters[name].labels(**self._labels, **{"class": cls}).inc(value)
