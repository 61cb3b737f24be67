"""Who is healthy: judged by the traffic itself, by probes while healthy, and by probes with back-off until healed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import aiohttp

from .instances import Instance, PrefillInstance
from .supervisor import Supervisor
from .upstream import Kind, Local, Sessions, failure

logger = logging.getLogger(__name__)

PAUSE_S, PAUSE_MAX_S = 0.5, 15.0
"""Between probes of an unhealthy instance, first and last (seconds): a restart takes a quarter of a minute at least."""
GROWTH = 1.5
JITTER = 0.3
"""A pause is stretched by up to this share, so that many routers do not probe in step."""
REFUSAL_S = 2.0
"""How long a connection is waited for that is to tell whether a server is still there (seconds)."""


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Stock router flags (--health-*)."""

    endpoint: str = "/health"
    interval_s: float = 60.0
    timeout_s: float = 5.0
    failures: int = 3
    """Failures in a row that make an instance unhealthy: connections lost, time-outs, probes. A refused connection
    does at once."""
    successes: int = 2
    """Probes in a row that heal it."""
    probe: bool = True
    """Whether healthy instances are probed too."""

    @property
    def pause_s(self) -> float:
        """First pause between probes of an unhealthy instance, which is asked as often as a healthy one at least."""
        return min(PAUSE_S, self.interval_s)

    @property
    def pause_max_s(self) -> float:
        """Longest such pause (seconds)."""
        return min(PAUSE_MAX_S, self.interval_s)


class Health:
    """Keeps ``Instance.healthy``. One task per instance; ``run`` ends when cancelled."""

    def __init__(
        self, instances: Sequence[Instance], sessions: Sessions, config: HealthConfig, supervisor: Supervisor
    ) -> None:
        self._instances = instances
        self._sessions = sessions
        self._config = config
        self._supervisor = supervisor
        self._woken = {i.url: asyncio.Event() for i in instances}

    def answered(self, instance: Instance) -> None:
        """A request was answered."""
        instance.failures = 0
        instance.heard()

    def lost(self, instance: Instance, kind: Kind) -> None:
        """A request was lost at ``instance``, as ``upstream.Lost`` says."""
        instance.lost += 1
        if kind == "cut":
            # Its own verdict, which is not to be counted twice.
            return
        instance.breaker.failed()
        self._failed(instance, f"connection {kind}", at_once=kind == "refused")

    def timed_out(self, instance: Instance, began: float) -> None:
        """A request that was sent at ``began`` has run into its time limit; one that others were answered beside
        says nothing of the instance."""
        if instance.heard_at < began:
            instance.breaker.failed()
            self._failed(instance, "requests time out")

    def suspect(self, instance: Instance) -> None:
        """Have it probed at once."""
        self._woken[instance.url].set()

    async def refuses(self, instance: Instance) -> bool:
        """Whether nobody listens at ``instance`` any more."""
        url = instance.address("")
        try:
            async with asyncio.timeout(REFUSAL_S):
                _, writer = await asyncio.open_connection(url.host, url.port)
        except ConnectionError:
            self._failed(instance, "connection refused", at_once=True)
            return True
        except OSError:
            return False
        writer.close()
        return False

    def _failed(self, instance: Instance, why: str, *, at_once: bool = False) -> None:
        instance.failures += 1
        if at_once or instance.failures >= self._config.failures:
            self._down(instance, why)
        self._woken[instance.url].set()

    def _down(self, instance: Instance, why: str) -> None:
        if not instance.healthy:
            return
        instance.healthy = False
        if isinstance(instance, PrefillInstance):
            # It will come back with an empty cache.
            instance.prefixes.clear()
        logger.warning("%s %s is unhealthy: %s", instance.role, instance.url, why)
        self._woken[instance.url].set()
        instance.cut()

    async def run(self) -> None:
        """Watch all instances; a watcher that fails starts again alone."""
        async with asyncio.TaskGroup() as group:
            for i in self._instances:
                group.create_task(self._supervisor.run(f"health of {i.url}", partial(self._watch, i)))

    async def _watch(self, instance: Instance) -> None:
        """Probe at each interval, and at once when the traffic gives reason to."""
        woken, config = self._woken[instance.url], self._config
        due = self._next()
        while True:
            if not instance.healthy:
                await self._heal(instance)
                due = self._next()
            woken.clear()
            suspect = await self._wait(woken, min(config.timeout_s, config.interval_s))
            now = time.monotonic()
            silent = instance.outstanding > 0 and now - instance.heard_at >= config.timeout_s
            if config.probe and instance.healthy and (suspect or silent or now >= due):
                await self._check(instance)
                due = self._next()

    def _next(self) -> float:
        return time.monotonic() + self._config.interval_s * (1 + JITTER * random.random())

    @staticmethod
    async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _check(self, instance: Instance) -> None:
        """Probe until it answers well, or is known to be unhealthy. What the traffic says of it stands by itself."""
        bad = 0
        while instance.healthy:
            began = time.monotonic()
            try:
                why = await self._probe(instance)
            except Local:
                return
            # A server that answers others meanwhile is busy and not gone.
            if why is None or instance.heard_at > began:
                return
            bad += 1
            if bad >= self._config.failures:
                self._down(instance, why)
                return
            await asyncio.sleep(min(self._config.timeout_s, self._config.interval_s) * (1 + JITTER * random.random()))

    async def _heal(self, instance: Instance) -> None:
        pause, good = self._config.pause_s, 0
        while good < self._config.successes:
            await asyncio.sleep(pause * (1 + JITTER * random.random()))
            try:
                why = await self._probe(instance)
            except Local as e:
                why = str(e)
            if why is None:
                good, pause = good + 1, self._config.pause_s
            else:
                good, pause = 0, min(pause * GROWTH, self._config.pause_max_s)
        instance.failures = 0
        instance.breaker.healed()
        instance.healthy = True
        logger.info("%s %s is healthy again", instance.role, instance.url)

    async def _probe(self, instance: Instance) -> str | None:
        """None when it is well, else what is wrong. Raises Local when that could not be found out."""
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        path = self._config.endpoint.lstrip("/")
        try:
            async with self._sessions.of(instance).get(instance.address(path), timeout=timeout) as response:
                await response.read()
                return None if response.status < 400 else f"{self._config.endpoint} answered {response.status}"
        except aiohttp.ClientError as e:
            fault = failure(instance, e)
            if isinstance(fault, Local):
                raise fault from e
            return f"{self._config.endpoint}: {type(e).__name__}"
        except OSError as e:
            # TimeoutError is one.
            return f"{self._config.endpoint}: {type(e).__name__}"
