"""``GET /metrics``: Prometheus text of what the status shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from laps_core.pools.pressure import POOLS, Pool, pressure
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from .balancer import LapsMiniLoadBalancer

PREFIX = "laps_router_"
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 15.0, 60.0)


class Metrics:
    """Counters and gauges are read off at scrape time; only first tokens are recorded as they come."""

    def __init__(self, lb: LapsMiniLoadBalancer) -> None:
        self._lb = lb
        self._registry = CollectorRegistry(auto_describe=False)
        ttft = Histogram(
            f"{PREFIX}ttft_seconds",
            "Time to first token by class (seconds)",
            ["class"],
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._ttft = {p: ttft.labels(p) for p in POOLS}
        self._registry.register(self)

    def note_ttft(self, length_class: Pool, seconds: float) -> None:
        """Record one first token."""
        self._ttft[length_class].observe(seconds)

    def text(self) -> tuple[bytes, bytes]:
        """(body, content type)."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST.encode()

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls at each scrape."""
        lb, c = self._lb, self._lb.counts
        for name, text, values in (
            ("requests", "Requests by class", c.requests),
            ("spilled", "Requests sent to the other pool, by class", c.spilled),
            ("new_tokens", "Expected new tokens by class", c.tokens),
        ):
            yield _counter(name, text, "class", values.items())
        yield _counter("migrations", "Instances moved, by the pool they moved to", "target", c.moves.items())
        for name, text in (
            ("prefix_tokens", "Tokens expected to be found in a prefix cache"),
            ("copied", "Requests sent to the short pool to leave a copy of a shared prefix there"),
            ("retried", "Requests sent to a second instance"),
            ("failed", "Requests answered 502 or 504, or cut off"),
            ("rejected", "Requests answered 503"),
            ("refused", "Requests answered 4xx by the router"),
            ("disconnected", "Requests whose client went away"),
        ):
            metric = CounterMetricFamily(f"{PREFIX}{name}", text)
            metric.add_metric([], getattr(c, name))
            yield metric
        in_flight = GaugeMetricFamily(f"{PREFIX}in_flight", "Requests in flight")
        in_flight.add_metric([], lb.in_flight)
        yield in_flight
        yield from self._instances()
        yield from self._breakers()
        yield from self._tasks()

    def _breakers(self) -> Iterator[Metric]:
        text = "Circuit breaker of a server: 0 closed, 1 half open, 2 open"
        state = GaugeMetricFamily(f"{PREFIX}breaker_state", text, labels=["server", "role"])
        for i in self._lb.instances:
            state.add_metric([i.url, i.role], ("closed", "half_open", "open").index(i.breaker.state))
        yield state

    def _tasks(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(f"{PREFIX}task_up", "1 while a watcher or the controller runs", labels=["task"])
        again = CounterMetricFamily(f"{PREFIX}task_restarts", "Times it failed and started again", labels=["task"])
        for w in self._lb.supervisor.watched:
            up.add_metric([w.name], float(w.alive))
            again.add_metric([w.name], w.restarts)
        yield from (up, again)

    def _instances(self) -> Iterator[Metric]:
        lb = self._lb
        up = GaugeMetricFamily(f"{PREFIX}instance_up", "1 if healthy", labels=["server", "role"])
        requests = GaugeMetricFamily(f"{PREFIX}outstanding_requests", "Requests in flight", labels=["server", "role"])
        tokens = GaugeMetricFamily(f"{PREFIX}outstanding_tokens", "New tokens in flight", labels=["server", "role"])
        for i in lb.instances:
            up.add_metric([i.url, i.role], float(i.healthy))
            requests.add_metric([i.url, i.role], i.outstanding)
            tokens.add_metric([i.url, i.role], i.outstanding_tokens)
        yield from (up, requests, tokens)

        psi = GaugeMetricFamily(f"{PREFIX}instance_pressure", "Pressure of an instance", labels=["server", "pool"])
        backlog = GaugeMetricFamily(f"{PREFIX}backlog_tokens", "New tokens waiting", labels=["server", "pool"])
        for r in lb.readers:
            labels = [r.instance.url, r.instance.pool]
            psi.add_metric(labels, pressure(r.signals(), lb.config.pressure))
            backlog.add_metric(labels, r.load.backlog_tokens)
        yield from (psi, backlog)

        size = GaugeMetricFamily(f"{PREFIX}pool_instances", "Healthy instances of a pool", labels=["pool"])
        pool_psi = GaugeMetricFamily(f"{PREFIX}pool_pressure", "P90 pressure of a pool", labels=["pool"])
        for p in POOLS:
            size.add_metric([p], sum(i.healthy for i in lb.pools.members(p)))
            pool_psi.add_metric([p], lb.control.controller.raw[p])
        yield from (size, pool_psi)


def _counter(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> CounterMetricFamily:
    metric = CounterMetricFamily(f"{PREFIX}{name}", text, labels=[label])
    for value, count in values:
        metric.add_metric([value], count)
    return metric
