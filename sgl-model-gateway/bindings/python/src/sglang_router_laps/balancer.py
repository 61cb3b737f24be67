"""MiniLB's replacement in the stock launcher: it serves our router within the limit of file descriptors."""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

import uvicorn
from laps_core.pools.config import AllocConfig
from laps_core.pools.instances import Instance
from laps_core.pools.pressure import POOLS
from sglang_router.router_args import RouterArgs
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from . import stock_flags
from .http.app import LapsApp
from .http.keys import has_keys, is_local
from .http.parser import BoundedProtocol
from .request.trail import DECISION_HEADER, ID_HEADER, AccessLog
from .router import Router
from .stock import mini_lb
from .tracing import Tracer

logger = logging.getLogger(__name__)

PER_REQUEST = 3
"""File descriptors per request: connections to the client, a prefill server and a decode server."""
PER_SERVER = 2
"""File descriptors per server: health probes and load queries."""
SERVERS = 64
"""Least number of servers for which file descriptors are reserved, because servers can join later."""
SPARE = 16
"""File descriptors for log files, aborts, status pages and idle clients."""


class LapsBalancer:
    """Balancer with MiniLB's interface for the stock launcher and routes: ``start``, ``prefill_urls``, ``decode_urls``.

    Raises ConfigError if a stock flag is refused or missing, or if the servers do not fit the configuration.
    """

    def __init__(self, args: RouterArgs, config: AllocConfig) -> None:
        stock_flags.check(args)
        self.router = Router(args, config)

    # The stock routes that query the servers (model_info, ...) use these two lists.
    @property
    def prefill_urls(self) -> list[str]:
        """URLs of healthy prefill servers, or of all if none is healthy. Raises HTTPException if no server is known."""
        return _healthy(self.router.pools.instances)

    @property
    def decode_urls(self) -> list[str]:
        """URLs of healthy decode servers, or of all if none is healthy. Raises HTTPException if no server is known."""
        return _healthy(self.router.decoders)

    def start(self) -> None:
        """Serve until stopped. In-flight requests get --shutdown-grace-period-secs to finish."""
        level = (self.router.args.log_level or "info").upper()
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        mini_lb.lb = self
        router = self.router
        limit = raise_limit()
        queue = router.queue
        wanted = queue.max_in_flight, queue.max_queued
        shares = share_descriptors(limit, max(SERVERS, len(router.instances)), *wanted)
        queue.max_in_flight, queue.max_queued, clients = shares
        if wanted != (queue.max_in_flight, queue.max_queued):
            logger.warning(
                "%d requests at a time and %d queued, not %d and %d: %d file descriptors",
                queue.max_in_flight, queue.max_queued, *wanted, limit,
            )  # fmt: skip
        for pool in POOLS:
            logger.info("%s pool: %s", pool, " ".join(i.url for i in router.pools.members(pool)))
        if not has_keys(router.args):
            open_for = "only answers GET" if is_local(router.args) else "is closed"
            logger.info("/workers %s: neither --api-key nor --control-plane-api-keys is given", open_for)
        AccessLog.to_stderr()
        # The stock module may import all of SGLang (half a million objects). Each full garbage collection would then
        # stop all requests for 170 ms.
        gc.collect()
        gc.freeze()
        Server(self.server_config(), router, clients).run()

    def server_config(self) -> uvicorn.Config:
        """Return uvicorn's configuration for the application."""
        args = self.router.args
        tracer = Tracer.to(args.otlp_traces_endpoint) if args.enable_trace else None
        app: Any = LapsApp(self.router, mini_lb.app, tracer)
        if args.cors_allowed_origins:
            every, shown = ["*"], [ID_HEADER.decode(), DECISION_HEADER.decode()]
            app = CORSMiddleware(app, args.cors_allowed_origins, every, every, expose_headers=shown)
        return uvicorn.Config(
            app,
            host=args.host,
            port=args.port,
            http=BoundedProtocol.within(args.request_timeout_secs),
            ws="none",
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=args.shutdown_grace_period_secs,
            # uvicorn types this as int, but passes the value on to the event loop unchanged.
            timeout_keep_alive=self.router.config.keep_alive_s,  # type: ignore[arg-type]
            ssl_certfile=args.server_cert_path,
            ssl_keyfile=args.server_key_path,
        )


class Server(uvicorn.Server):
    """uvicorn's server, which marks the router as draining on a stop signal, and closes idle connections if there are
    more than ``clients`` connections: they would lock out new clients, or take the descriptors of requests."""

    def __init__(self, config: uvicorn.Config, router: Router, clients: int = sys.maxsize) -> None:
        super().__init__(config)
        self._router, self._clients = router, clients
        self._idle: set[Any] = set()
        """Timers of the connections that were idle at the last look."""

    async def on_tick(self, counter: int) -> bool:
        """Close the connections that have been idle longest. uvicorn calls this method ten times a second."""
        there: Any = self.server_state.connections
        before, self._idle = self._idle, set()
        if len(there) > self._clients:
            # While an answer is read, its connection is not idle.
            idle = [c for c in there if c.timeout_keep_alive_task and not c.transport.get_write_buffer_size()]
            self._idle = {c.timeout_keep_alive_task for c in idle}
            # A connection that was not idle at the last look may have a request that is not read yet.
            idle = sorted(
                (c for c in idle if c.timeout_keep_alive_task in before),
                key=lambda c: c.timeout_keep_alive_task.when(),
            )
            for c in idle[: len(there) - self._clients]:
                c.transport.abort()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Mark the router as draining. uvicorn calls this method on a signal."""
        self._router.draining = True
        super().handle_exit(sig, frame)


def _healthy(instances: Collection[Instance]) -> list[str]:
    if not instances:
        raise HTTPException(503, "There is no server registered")
    return [i.url for i in instances if i.healthy] or [i.url for i in instances]


def raise_limit() -> int:
    """Raise this process's soft limit of file descriptors to the hard limit. Return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # Some systems report a hard limit that they do not grant.
        return soft
    return hard


def share_descriptors(limit: int, servers: int, requests: int, queued: int) -> tuple[int, int, int]:
    """Return how many of ``requests`` at a time and of ``queued`` requests ``limit`` file descriptors allow, less the
    descriptors that are open already and those for ``servers`` servers, and how many connections to clients. At least
    one request is allowed."""
    if limit == resource.RLIM_INFINITY:
        return requests, queued, sys.maxsize
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:
        taken = SPARE
    free = max(0, limit - taken - SPARE - PER_SERVER * servers)
    # A queued request holds only the client's connection. A long queue takes no more requests away than it has.
    allowed = min(requests, max(1, (free - queued) // PER_REQUEST, min(queued, free // (PER_REQUEST + 1))))
    clients = max(SPARE, free - (PER_REQUEST - 1) * allowed)
    return allowed, min(queued, max(0, free - PER_REQUEST * allowed)), clients
