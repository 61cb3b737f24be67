"""Leftovers of a router once all requests have ended: leases, slots at servers, dead tasks, descriptors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

IDLE_MOST = 16
"""Most idle connections to one server. A connection is closed when unused for 4 s; the router reads signals every 0.4 s
over these connections in turn, so about ten stay open."""


@dataclass(frozen=True)
class Descriptors:
    """Descriptors of a process."""

    clients: int
    """Connections of clients."""
    upstream: Mapping[int, int]
    """Connections to servers, by port."""
    broken: int
    """Connections that only the other side has closed."""
    others: int
    """All other descriptors."""

    @classmethod
    def count(cls, process: psutil.Process, port: int, servers: Collection[int]) -> Descriptors:
        """Return the descriptors of the process that listens on ``port``. ``servers``: ports of the servers. Raises
        psutil.Error."""
        # Count first: a descriptor opened between the two calls must not count as an extra descriptor.
        number = process.num_fds()
        some = [c for c in process.net_connections("tcp") if c.status != psutil.CONN_LISTEN]
        upstream = Counter(c.raddr.port for c in some if c.raddr and c.raddr.port in servers)
        clients = [c for c in some if c.laddr.port == port]
        broken = sum(c.status != psutil.CONN_ESTABLISHED for c in some if c not in clients)
        return cls(len(clients), upstream, broken, number - len(clients) - upstream.total())


def find_in_status(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield leftovers in a router's /laps_status: leases, slots at servers, failed tasks."""
    for name in ("in_flight", "queued"):
        if status[name]:
            yield f"{status[name]} requests {name.replace('_', ' ')}"
    for i in (*status["prefill"], *status["decode"], *status["draining"]):
        if i["outstanding_requests"] or i["outstanding_tokens"]:
            yield f"{i['outstanding_requests']} requests and {i['outstanding_tokens']} tokens at {i['url']}"
    for task in status["tasks"]:
        if not task["alive"] or task["restarts"]:
            yield f"the task {task['name']} failed {task['restarts']} times: {task['error']}"


def find_extra_descriptors(now: Descriptors, before: Descriptors) -> Iterator[str]:
    """Yield descriptors that should be closed or that did not exist before the first request."""
    if now.clients:
        yield f"{now.clients} connections of clients"
    if now.broken:
        yield f"{now.broken} connections that their servers have closed"
    for port, number in now.upstream.items():
        if number > IDLE_MOST:
            yield f"{number} connections to the server at port {port}"
    if now.others > before.others:
        yield f"{now.others - before.others} descriptors more than before the first request"
