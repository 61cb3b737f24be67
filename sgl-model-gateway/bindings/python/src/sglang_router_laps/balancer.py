"""What the stock launcher starts in the place of its MiniLB: our router, on as many connections as it may have."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import secrets
import socket
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn
from laps_core.pools.pressure import POOLS
from sglang_router.router_args import RouterArgs
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from . import stock_flags
from .config import AllocConfig
from .http.app import LapsApp
from .http.keys import has_keys, is_local
from .http.parser import BoundedProtocol
from .processes import BEAT_S, Processes, listen, listen_alone
from .request.trail import DECISION_HEADER, ID_HEADER, AccessLog
from .router import Router, Worker
from .servers.instances import Instance
from .stock import mini_lb
from .tracing import Tracer

logger = logging.getLogger(__name__)

PER_REQUEST = 3
"""Descriptors: one connection of the client, one to a prefill and one to a decode server."""
PER_SERVER = 2
"""Descriptors: probes and questions about its load."""
SERVERS = 64
"""Servers that there is room for at least: they may come later."""
SPARE = 16
"""Descriptors: log files, aborts, status pages, clients that only hold a connection open."""


class LapsBalancer:
    """As the stock launcher and the stock routes know a MiniLB: ``start``, ``prefill_urls``, ``decode_urls``.

    Raises ConfigError when the servers and the configuration do not fit each other.
    """

    def __init__(self, args: RouterArgs, config: AllocConfig) -> None:
        stock_flags.check(args)
        n = config.router_workers
        # -1 is not set, and so is 0; no worker is left without a place.
        each = {flag: -(-getattr(args, flag) // n) for flag in ("max_concurrent_requests", "queue_size")}
        self.router = Router(replace(args, **each), config)

    # The stock routes that ask the servers something (model_info, ...) go through these two lists.
    @property
    def prefill_urls(self) -> list[str]:
        """Healthy prefill servers; all of them when none is healthy. Raises HTTPException when there are none."""
        return _healthy(self.router.pools.instances)

    @property
    def decode_urls(self) -> list[str]:
        """Healthy decode servers; all of them when none is healthy. Raises HTTPException when there are none."""
        return _healthy(self.router.decoders)

    def start(self) -> None:
        """Serve until stopped. In-flight requests get --shutdown-grace-period-secs to finish.

        Ends the program (one line on stderr, exit status 1) where several workers cannot have the port.
        """
        level = (self.router.args.log_level or "info").upper()
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        mini_lb.lb = self
        router = self.router
        limit = raise_limit()
        queue = router.queue
        enough = requests_at_most(limit, max(SERVERS, len(router.instances)), queue.size)
        if enough < queue.most:
            logger.warning("%d requests at a time instead of %d: %d file descriptors", enough, queue.most, limit)
            queue.most, queue.size = enough, min(queue.size, enough)
        for pool in POOLS:
            logger.info("%s pool: %s", pool, " ".join(i.url for i in router.pools.members(pool)))
        if not has_keys(router.args):
            open_for = "only answers GET" if is_local(router.args) else "is closed"
            logger.info("/workers %s: neither --api-key nor --control-plane-api-keys is given", open_for)
        AccessLog.to_stderr()
        # The stock module imports all of SGLang: half a million objects, which the garbage collector would go through
        # again and again, 170 ms each time with every request waiting. Workers share what is frozen before they start.
        gc.collect()
        gc.freeze()
        if router.config.router_workers == 1:
            Server(self.server_config(), router).run()
        else:
            self._start_workers(router.config.router_workers)

    def _start_workers(self, n: int) -> None:
        args, scheme = self.router.args, "https" if self.router.args.server_cert_path else "http"
        try:
            sockets = [list(both) for both in zip(listen(args.host, args.port, n), listen_alone(n), strict=True)]
        except OSError as e:
            print(f"error: --port: {args.host}:{args.port}: {e.strerror or e}", file=sys.stderr)
            raise SystemExit(1) from None
        port = sockets[0][0].getsockname()[1]
        logger.info("%d workers running on %s://%s:%d", n, scheme, args.host, port)
        urls = [f"{scheme}://127.0.0.1:{alone.getsockname()[1]}" for _, alone in sockets]

        secret = secrets.token_hex()

        def serve(index: int, beat: Callable[[], None]) -> None:
            self.router.worker = Worker(index, urls, secret)
            Server(self.server_config(), self.router, beat).run(sockets[index])

        Processes(sockets, serve).run()

    def server_config(self) -> uvicorn.Config:
        """How the application is served."""
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
            # Typed as whole seconds, and handed to the event loop as they are.
            timeout_keep_alive=self.router.config.keep_alive_s,  # type: ignore[arg-type]
            ssl_certfile=args.server_cert_path,
            ssl_keyfile=args.server_key_path,
        )


class Server(uvicorn.Server):
    """Says at once that it is no longer ready when it is told to stop, and shows its parent process that it runs."""

    def __init__(self, config: uvicorn.Config, router: Router, beat: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self._router = router
        self._beat = beat

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Call ``beat`` for as long as the event loop turns."""
        beating = asyncio.create_task(self._keep_beating())
        try:
            await super().serve(sockets)
        finally:
            beating.cancel()

    async def _keep_beating(self) -> None:
        while self._beat is not None:
            self._beat()
            await asyncio.sleep(BEAT_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn calls on a signal."""
        self._router.draining = True
        super().handle_exit(sig, frame)


def _healthy(instances: Collection[Instance]) -> list[str]:
    if not instances:
        raise HTTPException(503, "There is no server registered")
    return [i.url for i in instances if i.healthy] or [i.url for i in instances]


def raise_limit() -> int:
    """Raise this process's soft limit of descriptors to its hard one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # Some systems name a hard limit that they do not grant.
        return soft
    return hard


def requests_at_most(limit: int, servers: int, queued: int) -> int:
    """How many requests at a time ``limit`` descriptors are enough for, with what is open already, ``servers`` servers,
    and so many ``queued`` beside them, but at most as many as are served."""
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:
        taken = SPARE
    free = limit - taken - SPARE - PER_SERVER * servers
    # One of the queue holds the client's connection alone.
    return max(1, (free - queued) // PER_REQUEST, min(queued, free // (PER_REQUEST + 1)))
