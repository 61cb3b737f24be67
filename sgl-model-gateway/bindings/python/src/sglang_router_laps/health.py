"""Who is healthy: judged by the traffic itself, by probes while healthy, and by probes with back-off until healed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from .instances import Instance, PrefillInstance
from .upstream import Sessions

logger = logging.getLogger(__name__)

GROWTH = 1.5
JITTER = 0.3
"""A pause is stretched by up to this share, so that many routers do not probe in step."""


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Stock router flags (--health-*), and the back-off of --laps-alloc-config."""

    endpoint: str = "/health"
    interval_s: float = 60.0
    timeout_s: float = 5.0
    failures: int = 3
    """Failures in a row that make an instance unhealthy; a refused connection does at once."""
    successes: int = 2
    """Probes in a row that heal it."""
    probe: bool = True
    """Whether healthy instances are probed too."""
    backoff_s: float = 0.5
    backoff_max_s: float = 15.0


class Health:
    """Keeps ``Instance.healthy``. One task per instance; ``run`` ends when cancelled."""

    def __init__(self, instances: Sequence[Instance], sessions: Sessions, config: HealthConfig) -> None:
        self._instances = instances
        self._sessions = sessions
        self._config = config
        self._woken = {i.url: asyncio.Event() for i in instances}

    def answered(self, instance: Instance) -> None:
        """A request was answered in full."""
        instance.failures = 0

    def lost(self, instance: Instance, *, refused: bool) -> None:
        """A connection was refused, or lost in the middle."""
        instance.lost += 1
        self._failed(instance, "connection refused" if refused else "connection lost", at_once=refused)

    def _failed(self, instance: Instance, why: str, *, at_once: bool = False) -> None:
        instance.failures += 1
        if instance.healthy and (at_once or instance.failures >= self._config.failures):
            instance.healthy = False
            if isinstance(instance, PrefillInstance):
                # It will come back with an empty cache.
                instance.prefixes.clear()
            logger.warning("%s %s is unhealthy: %s", instance.role, instance.url, why)
            self._woken[instance.url].set()

    async def run(self) -> None:
        """Watch all instances."""
        async with asyncio.TaskGroup() as group:
            for i in self._instances:
                group.create_task(self._watch(i))

    async def _watch(self, instance: Instance) -> None:
        woken = self._woken[instance.url]
        while True:
            if instance.healthy:
                woken.clear()
                pause = self._config.interval_s * (1 + JITTER * random.random()) if self._config.probe else None
                try:
                    await asyncio.wait_for(woken.wait(), pause)
                except TimeoutError:
                    why = await self._probe(instance)
                    if why:
                        self._failed(instance, why)
                    else:
                        instance.failures = 0
            else:
                await self._heal(instance)

    async def _heal(self, instance: Instance) -> None:
        pause, good = self._config.backoff_s, 0
        while good < self._config.successes:
            await asyncio.sleep(pause * (1 + JITTER * random.random()))
            if await self._probe(instance) is None:
                good, pause = good + 1, self._config.backoff_s
            else:
                good, pause = 0, min(pause * GROWTH, self._config.backoff_max_s)
        instance.failures = 0
        instance.healthy = True
        logger.info("%s %s is healthy again", instance.role, instance.url)

    async def _probe(self, instance: Instance) -> str | None:
        """None when it is well, else what is wrong."""
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        path = self._config.endpoint.lstrip("/")
        try:
            async with self._sessions.of(instance).get(instance.address(path), timeout=timeout) as response:
                await response.read()
                return None if response.status < 400 else f"{self._config.endpoint} answered {response.status}"
        except (aiohttp.ClientError, OSError) as e:
            # TimeoutError is an OSError.
            return f"{self._config.endpoint}: {type(e).__name__}"
