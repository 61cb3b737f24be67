"""``GET /metrics``: Prometheus text of what the status shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from laps_core.pools.pressure import POOLS, pressure
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from .journal import PREFIX
from .view import View


class Metrics:
    """Counters and gauges are read off at scrape time, beside what the journal has recorded."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._registry = view.journal.registry
        self._registry.register(self)

    def text(self) -> tuple[bytes, bytes]:
        """(body, content type)."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST.encode()

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls at each scrape."""
        c = self._view.journal.counts
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
        in_flight.add_metric([], self._view.places.taken)
        yield in_flight
        yield from self._instances()
        yield from self._breakers()
        yield from self._tasks()

    def _breakers(self) -> Iterator[Metric]:
        text = "Circuit breaker of a server: 0 closed, 1 half open, 2 open"
        state = GaugeMetricFamily(f"{PREFIX}breaker_state", text, labels=["server", "role"])
        for i in self._view.instances:
            state.add_metric([i.url, i.role], ("closed", "half_open", "open").index(i.breaker.state))
        yield state

    def _tasks(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(f"{PREFIX}task_up", "1 while a watcher or the controller runs", labels=["task"])
        again = CounterMetricFamily(f"{PREFIX}task_restarts", "Times it failed and started again", labels=["task"])
        for w in self._view.supervisor.watched:
            up.add_metric([w.name], float(w.alive))
            again.add_metric([w.name], w.restarts)
        yield from (up, again)

    def _instances(self) -> Iterator[Metric]:
        view = self._view
        up = GaugeMetricFamily(f"{PREFIX}instance_up", "1 if healthy", labels=["server", "role"])
        requests = GaugeMetricFamily(f"{PREFIX}outstanding_requests", "Requests in flight", labels=["server", "role"])
        tokens = GaugeMetricFamily(f"{PREFIX}outstanding_tokens", "New tokens in flight", labels=["server", "role"])
        for i in view.instances:
            up.add_metric([i.url, i.role], float(i.healthy))
            requests.add_metric([i.url, i.role], i.outstanding)
            tokens.add_metric([i.url, i.role], i.outstanding_tokens)
        yield from (up, requests, tokens)

        psi = GaugeMetricFamily(f"{PREFIX}instance_pressure", "Pressure of an instance", labels=["server", "pool"])
        backlog = GaugeMetricFamily(f"{PREFIX}backlog_tokens", "New tokens waiting", labels=["server", "pool"])
        for r in view.readers:
            labels = [r.instance.url, r.instance.pool]
            psi.add_metric(labels, pressure(r.signals(), view.config.pressure))
            backlog.add_metric(labels, r.load.backlog_tokens)
        yield from (psi, backlog)

        size = GaugeMetricFamily(f"{PREFIX}pool_instances", "Healthy instances of a pool", labels=["pool"])
        pool_psi = GaugeMetricFamily(f"{PREFIX}pool_pressure", "P90 pressure of a pool", labels=["pool"])
        for p in POOLS:
            size.add_metric([p], sum(i.healthy for i in view.pairs.pools.members(p)))
            pool_psi.add_metric([p], view.control.controller.raw[p])
        yield from (size, pool_psi)


def _counter(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> CounterMetricFamily:
    metric = CounterMetricFamily(f"{PREFIX}{name}", text, labels=[label])
    for value, count in values:
        metric.add_metric([value], count)
    return metric
