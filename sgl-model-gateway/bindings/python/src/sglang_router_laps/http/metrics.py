"""``GET /metrics``: Prometheus text of what the status shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from laps_core.pools.pressure import POOLS, pressure
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..router import Router
from ..telemetry.journal import PREFIX

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
Rows = Iterable[tuple[tuple[str, ...], float]]
"""Labels and value of each sample."""
BREAKER = ("closed", "half_open", "open")


class Metrics:
    """Counters and gauges are read off at scrape time, beside what the journal has recorded."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._registry = router.services.journal.registry
        self._registry.register(self)

    def text(self) -> tuple[bytes, str]:
        """(body, content type)."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls at each scrape."""
        yield from self._requests()
        yield from self._servers()
        yield from self._pools()
        tasks = self._router.supervisor.watched
        alive = [((w.name,), float(w.alive)) for w in tasks]
        yield _family(GaugeMetricFamily, "task_up", "1 while a watcher or the controller runs", alive, "task")
        again = [((w.name,), w.restarts) for w in tasks]
        yield _family(CounterMetricFamily, "task_restarts", "Times it failed and started again", again, "task")

    def _requests(self) -> Iterator[Metric]:
        c = self._router.counts
        for name, text, label, values in (
            ("requests", "Requests by class", "class", c.requests),
            ("spilled", "Requests sent to the other pool, by class", "class", c.spilled),
            ("new_tokens", "Expected new tokens by class", "class", c.tokens),
            ("migrations", "Instances moved, by the pool they moved to", "target", c.moves),
        ):
            yield _family(CounterMetricFamily, name, text, [((k,), n) for k, n in values.items()], label)
        for name, text in (
            ("prefix_tokens", "Tokens expected to be found in a prefix cache"),
            ("copied", "Requests sent to the short pool to leave a copy of a shared prefix there"),
            ("retried", "Requests sent to a second instance"),
            ("failed", "Requests answered 502 or 504, or cut off"),
            ("rejected", "Requests answered 503"),
            ("refused", "Requests answered 4xx by the router"),
            ("disconnected", "Requests whose client went away"),
        ):
            yield _family(CounterMetricFamily, name, text, [((), getattr(c, name))])
        yield _family(GaugeMetricFamily, "in_flight", "Requests in flight", [((), self._router.places.taken)])

    def _servers(self) -> Iterator[Metric]:
        servers = [((i.url, i.role), i) for i in self._router.instances]
        states = "Circuit breaker of a server: 0 closed, 1 half open, 2 open"
        for name, text, rows in (
            ("instance_up", "1 if healthy", [(k, float(i.healthy)) for k, i in servers]),
            ("outstanding_requests", "Requests in flight", [(k, float(i.outstanding)) for k, i in servers]),
            ("outstanding_tokens", "New tokens in flight", [(k, float(i.outstanding_tokens)) for k, i in servers]),
            ("breaker_state", states, [(k, float(BREAKER.index(i.breaker.state))) for k, i in servers]),
        ):
            yield _family(GaugeMetricFamily, name, text, rows, "server", "role")

    def _pools(self) -> Iterator[Metric]:
        router, readers = self._router, [((r.instance.url, r.instance.pool), r) for r in self._router.readers]
        psi = [(k, pressure(r.signals(), router.config.pressure)) for k, r in readers]
        yield _family(GaugeMetricFamily, "instance_pressure", "Pressure of an instance", psi, "server", "pool")
        backlog = [(k, r.load.backlog_tokens) for k, r in readers]
        yield _family(GaugeMetricFamily, "backlog_tokens", "New tokens waiting", backlog, "server", "pool")
        size = [((p,), float(sum(i.healthy for i in router.pools.members(p)))) for p in POOLS]
        yield _family(GaugeMetricFamily, "pool_instances", "Healthy instances of a pool", size, "pool")
        raw = [((p,), router.control.controller.raw[p]) for p in POOLS]
        yield _family(GaugeMetricFamily, "pool_pressure", "P90 pressure of a pool", raw, "pool")


def _family(kind: Family, name: str, text: str, rows: Rows, *labels: str) -> Metric:
    metric = kind(f"{PREFIX}{name}", text, labels=labels)
    for values, number in rows:
        metric.add_metric(values, number)
    return metric
