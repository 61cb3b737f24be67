"""What the stock launcher starts in the place of its MiniLB: the same class to it, another router inside."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import uvicorn
from laps_core.config import ConfigError
from sglang_router import mini_lb
from sglang_router.router_args import RouterArgs
from starlette.middleware.cors import CORSMiddleware

from . import stock_flags
from .config import AllocConfig
from .http.app import LapsApp
from .router import Router
from .servers.instances import Instance

logger = logging.getLogger(__name__)


class LapsMiniLoadBalancer(mini_lb.MiniLoadBalancer):  # type: ignore[misc]
    """A MiniLB whose generating routes are ours; every other route stays the stock one.

    Raises ConfigError when the servers and the configuration do not fit each other.
    """

    def __init__(self, router_args: RouterArgs, config: AllocConfig) -> None:
        self._args = router_args
        self._keep_alive_s = config.keep_alive_s
        stock_flags.check_urls(router_args)
        super().__init__(router_args)
        self.router = Router(router_args, config)

    def _validate_router_args(self, router_args: RouterArgs) -> None:
        # Not the stock check: that one also warns of a random policy, which is not what runs here.
        if not router_args.pd_disaggregation:
            raise ConfigError("--enable-laps-alloc: needs --pd-disaggregation")
        if not router_args.decode_urls:
            raise ConfigError("--enable-laps-alloc: needs at least one --decode")
        stock_flags.check(router_args)

    # The stock routes that ask the servers something (model_info, flush_cache, ...) go through these two lists.
    @property
    def prefill_urls(self) -> list[str]:
        """Healthy prefill servers; all of them when none is healthy."""
        return _healthy(self.router.pools.instances)

    @prefill_urls.setter
    def prefill_urls(self, _: list[str]) -> None:
        """The stock constructor sets what is already known."""

    @property
    def decode_urls(self) -> list[str]:
        """Healthy decode servers; all of them when none is healthy."""
        return _healthy(self.router.decoders)

    @decode_urls.setter
    def decode_urls(self, _: list[str]) -> None:
        """The stock constructor sets what is already known."""

    def start(self) -> None:
        """Serve until stopped. In-flight requests get --shutdown-grace-period-secs to finish."""
        level = (self._args.log_level or "info").upper()
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        mini_lb.lb = self
        router = self.router
        router.places.fit(len(router.instances))
        logger.info("short pool: %s", " ".join(i.url for i in router.pools.members("short")))
        logger.info("long pool: %s", " ".join(i.url for i in router.pools.members("long")))
        uvicorn.Server(self.server_config()).run()

    def server_config(self) -> uvicorn.Config:
        """How the application is served."""
        args = self._args
        app: Any = LapsApp(self.router, mini_lb.app)
        if args.cors_allowed_origins:
            app = CORSMiddleware(app, args.cors_allowed_origins, allow_methods=["*"], allow_headers=["*"])
        return uvicorn.Config(
            app,
            host=self.host,
            port=self.port,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=args.shutdown_grace_period_secs,
            # Typed as whole seconds, and handed to the event loop as they are.
            timeout_keep_alive=self._keep_alive_s,  # type: ignore[arg-type]
            ssl_certfile=args.server_cert_path,
            ssl_keyfile=args.server_key_path,
        )


def _healthy(instances: Collection[Instance]) -> list[str]:
    return [i.url for i in instances if i.healthy] or [i.url for i in instances]
