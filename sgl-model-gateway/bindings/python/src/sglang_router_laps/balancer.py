"""The MiniLB with LAPS pools: holds the parts together, and starts them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Coroutine
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from laps_core.config import ConfigError
from laps_core.pools.pressure import Pool
from sglang_router import mini_lb
from sglang_router.router_args import RouterArgs
from starlette.middleware.cors import CORSMiddleware

from . import descriptors, stock_flags
from .aborts import Aborter
from .breaker import Breaker, BreakerConfig
from .config import AllocConfig
from .control import Control
from .counts import Counts
from .health import Health, HealthConfig
from .instances import Instance, open_to
from .metrics import Metrics
from .pools import Choice, Pools
from .retries import RetryBudget, RetryConfig
from .signals import SignalReader
from .supervisor import Supervisor
from .tokens import make_counter
from .ttft import TtftWindow
from .upstream import Sessions

logger = logging.getLogger(__name__)


class LapsMiniLoadBalancer(mini_lb.MiniLoadBalancer):  # type: ignore[misc]
    """A MiniLB whose generating routes are ours; every other route stays the stock one.

    Raises ConfigError when the servers and the configuration do not fit each other.
    """

    def __init__(self, router_args: RouterArgs, config: AllocConfig) -> None:
        limit = router_args.max_concurrent_requests
        self.config = config
        self.max_inflight = min(config.max_inflight, limit) if limit > 0 else config.max_inflight
        self.max_payload = router_args.max_payload_size
        self.router_args = router_args
        _check_urls(router_args)
        self.counter = make_counter(config.tokenizer, config.exact_bytes)
        self.pools = Pools(router_args.prefill_urls, config)
        self.decoders = [Instance(url, "decode") for url in router_args.decode_urls]
        self.instances: list[Instance] = [*self.pools.instances, *self.decoders]
        super().__init__(router_args)

        twice = [url for url, n in Counter(i.url for i in self.instances).items() if n > 1]
        if twice:
            raise ConfigError(f"{twice[0]} is given twice")
        self.sessions = Sessions(self.timeout, config.connect_timeout_s)
        breaker = _breaker_config(router_args)
        for i in self.instances:
            i.breaker = Breaker(breaker)
        self.retries = _retry_config(router_args)
        self.budget = RetryBudget()
        self.supervisor = Supervisor()
        self.health = Health(self.instances, self.sessions, _health_config(router_args, config), self.supervisor)
        self.aborter = Aborter(self.sessions, self.instances, router_args.api_key)
        self.readers = [
            SignalReader(i, self.sessions, router_args.api_key, max(config.sample_s, 1.0), time.monotonic)
            for i in self.pools.instances
        ]
        self.counts = Counts()
        self.ttft = TtftWindow(config.history_s)
        self.control = Control(self.pools, self.readers, config, self.counts, self.ttft)
        self.metrics = Metrics(self)
        self.in_flight = 0
        self.started_at = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

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
        return _healthy(self.pools.instances)

    @prefill_urls.setter
    def prefill_urls(self, _: list[str]) -> None:
        """The stock constructor sets what is already known."""

    @property
    def decode_urls(self) -> list[str]:
        """Healthy decode servers; all of them when none is healthy."""
        return _healthy(self.decoders)

    @decode_urls.setter
    def decode_urls(self, _: list[str]) -> None:
        """The stock constructor sets what is already known."""

    def start(self) -> None:
        """Serve until stopped. In-flight requests get --shutdown-grace-period-secs to finish."""
        level = (self.router_args.log_level or "info").upper()
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        mini_lb.lb = self
        self._fit_descriptors()
        logger.info("short pool: %s", " ".join(i.url for i in self.pools.members("short")))
        logger.info("long pool: %s", " ".join(i.url for i in self.pools.members("long")))
        uvicorn.Server(self.server_config()).run()

    def server_config(self) -> uvicorn.Config:
        """How the application is served."""
        from .app import LapsApp

        args = self.router_args
        app: Any = LapsApp(self, mini_lb.app)
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
            timeout_keep_alive=self.config.keep_alive_s,  # type: ignore[arg-type]
            ssl_certfile=args.server_cert_path,
            ssl_keyfile=args.server_key_path,
        )

    def _fit_descriptors(self) -> None:
        limit = descriptors.raise_limit()
        most = descriptors.requests_at_most(limit, len(self.instances))
        if most < self.max_inflight:
            logger.warning("%d requests at a time instead of %d: %d file descriptors", most, self.max_inflight, limit)
            self.max_inflight = most

    async def open(self) -> None:
        """Start the background tasks."""
        self.spawn(self.health.run())
        self.spawn(self.supervisor.run("controller", self.control.run))

    async def close(self) -> None:
        """Stop the background tasks and close all connections."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sessions.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside everything else, unless all is being closed; what it fails with is logged."""
        if self._closing:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            logger.error("a background task failed", exc_info=task.exception())

    def choose_decode(self, avoid: Collection[Instance] = ()) -> Instance | None:
        """The decode server with the least in flight; one in ``avoid`` only if there is no other."""
        usable = open_to(self.decoders, avoid)
        return min(usable, key=lambda i: (i.outstanding, i.served), default=None)

    def elsewhere(self, avoid: Collection[Instance]) -> bool:
        """Whether there are servers of both roles that are not in ``avoid``."""
        return all(any(i.usable and i not in avoid for i in role) for role in (self.pools.instances, self.decoders))

    def another(self, avoid: Collection[Instance]) -> bool:
        """Whether there is a server of either role that is not in ``avoid``: with it the pair is another one.

        One that is on trial has no room now, but soon.
        """
        return any(i.healthy and i not in avoid for i in (*self.pools.instances, *self.decoders))

    def any_prefill(self) -> bool:
        """Whether any prefill server is healthy."""
        return any(i.healthy for i in self.pools.instances)

    def note_choice(self, choice: Choice, tokens: int) -> None:
        """Count a request that found its place."""
        c = self.counts
        c.requests[choice.length_class] += 1
        c.tokens[choice.length_class] += choice.new_tokens
        c.prefix_tokens += tokens - choice.new_tokens
        c.spilled[choice.length_class] += choice.spilled
        c.copied += choice.copies

    def note_ttft(self, length_class: Pool, seconds: float) -> None:
        """Note one first token."""
        self.ttft.add(time.monotonic(), length_class, seconds)
        self.metrics.note_ttft(length_class, seconds)

    def forget_prefixes(self) -> None:
        """The servers' caches are being flushed."""
        self.pools.forget_prefixes()


def _healthy(instances: Collection[Instance]) -> list[str]:
    return [i.url for i in instances if i.healthy] or [i.url for i in instances]


def _health_config(args: RouterArgs, config: AllocConfig) -> HealthConfig:
    return HealthConfig(
        endpoint=args.health_check_endpoint,
        interval_s=args.health_check_interval_secs,
        timeout_s=args.health_check_timeout_secs,
        failures=args.health_failure_threshold,
        successes=args.health_success_threshold,
        probe=not args.disable_health_check,
        backoff_s=config.probe_backoff_s,
        backoff_max_s=config.probe_backoff_max_s,
    )


def _breaker_config(args: RouterArgs) -> BreakerConfig:
    return BreakerConfig(
        failures=0 if args.disable_circuit_breaker else max(0, args.cb_failure_threshold),
        successes=args.cb_success_threshold,
        timeout_s=args.cb_timeout_duration_secs,
        window_s=args.cb_window_duration_secs,
    )


def _retry_config(args: RouterArgs) -> RetryConfig:
    return RetryConfig(
        # As the stock flags count: the first try is one of them.
        attempts=1 if args.disable_retries else max(1, args.retry_max_retries),
        backoff_s=args.retry_initial_backoff_ms / 1e3,
        backoff_max_s=args.retry_max_backoff_ms / 1e3,
        growth=args.retry_backoff_multiplier,
        jitter=args.retry_jitter_factor,
    )


def _check_urls(args: RouterArgs) -> None:
    """Raise ConfigError for what no request could be sent to."""
    given = [("--prefill", url) for url, _ in args.prefill_urls] + [("--decode", url) for url in args.decode_urls]
    for flag, url in given:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
            # Reading it is what checks it.
            good = good and parts.port != 0 and not any(c.isspace() for c in url)
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"{flag}: {url!r} is not the URL of a server, like http://10.0.0.1:30000")
