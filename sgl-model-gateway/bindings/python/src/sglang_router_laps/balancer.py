"""What the stock launcher starts in the place of its MiniLB: our router, on as many connections as it may have."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Collection
from typing import Any

import uvicorn
from laps_core.pools.pressure import POOLS
from sglang_router import mini_lb
from sglang_router.router_args import RouterArgs
from starlette.middleware.cors import CORSMiddleware

from . import stock_flags
from .config import AllocConfig
from .http.app import LapsApp
from .router import Router
from .servers.instances import Instance

logger = logging.getLogger(__name__)

PER_REQUEST = 3
"""Descriptors: one connection of the client, one to a prefill and one to a decode server."""
PER_SERVER = 2
"""Descriptors: probes and questions about its load."""
SPARE = 16
"""Descriptors: log files, aborts, status pages, clients that only hold a connection open."""


class LapsBalancer:
    """As the stock launcher and the stock routes know a MiniLB: ``start``, ``prefill_urls``, ``decode_urls``.

    Raises ConfigError when the servers and the configuration do not fit each other.
    """

    def __init__(self, args: RouterArgs, config: AllocConfig) -> None:
        stock_flags.check(args)
        self.router = Router(args, config)

    # The stock routes that ask the servers something (model_info, ...) go through these two lists.
    @property
    def prefill_urls(self) -> list[str]:
        """Healthy prefill servers; all of them when none is healthy."""
        return _healthy(self.router.pools.instances)

    @property
    def decode_urls(self) -> list[str]:
        """Healthy decode servers; all of them when none is healthy."""
        return _healthy(self.router.decoders)

    def start(self) -> None:
        """Serve until stopped. In-flight requests get --shutdown-grace-period-secs to finish."""
        level = (self.router.args.log_level or "info").upper()
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        mini_lb.lb = self
        router = self.router
        limit = raise_limit()
        enough = requests_at_most(limit, len(router.instances))
        if enough < router.max_in_flight:
            logger.warning(
                "%d requests at a time instead of %d: %d file descriptors", enough, router.max_in_flight, limit
            )
            router.max_in_flight = enough
        for pool in POOLS:
            logger.info("%s pool: %s", pool, " ".join(i.url for i in router.pools.members(pool)))
        uvicorn.Server(self.server_config()).run()

    def server_config(self) -> uvicorn.Config:
        """How the application is served."""
        args = self.router.args
        app: Any = LapsApp(self.router, mini_lb.app)
        if args.cors_allowed_origins:
            app = CORSMiddleware(app, args.cors_allowed_origins, allow_methods=["*"], allow_headers=["*"])
        return uvicorn.Config(
            app,
            host=args.host,
            port=args.port,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=args.shutdown_grace_period_secs,
            # Typed as whole seconds, and handed to the event loop as they are.
            timeout_keep_alive=self.router.config.keep_alive_s,  # type: ignore[arg-type]
            ssl_certfile=args.server_cert_path,
            ssl_keyfile=args.server_key_path,
        )


def _healthy(instances: Collection[Instance]) -> list[str]:
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


def requests_at_most(limit: int, servers: int) -> int:
    """How many requests ``limit`` descriptors are enough for, with what is open already and ``servers`` servers."""
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:
        taken = SPARE
    return max(1, (limit - taken - SPARE - PER_SERVER * servers) // PER_REQUEST)
