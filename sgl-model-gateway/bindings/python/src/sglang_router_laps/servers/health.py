"""Who is healthy: judged by the traffic itself, by probes while healthy, and by probes with back-off until healed.

How often and how long is probed, and how many failures and successes decide, are the stock router's --health-*.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time

import aiohttp
from sglang_router.router_args import RouterArgs

from .instances import Instance
from .upstream import Kind, Lost, Sessions, failure

logger = logging.getLogger(__name__)

PAUSE_S, PAUSE_MAX_S = 0.5, 2.0
"""Between probes of an unhealthy instance, first and last (seconds): one that is back is to have requests within five
seconds."""
GROWTH = 1.5
JITTER = 0.3
"""A pause is stretched by up to this share, so that many routers do not probe in step."""
REFUSAL_S = 2.0
"""How long a connection is waited for that is to tell whether a server is still there (seconds)."""
SILENCE = 1 / 6
"""Longest pause of a stream, as a share of --request-timeout-secs: five minutes, if that is not given. A decode server
that has taken KV back computes it again first."""


class Health:
    """Keeps ``Instance.healthy``."""

    def __init__(self, sessions: Sessions, args: RouterArgs) -> None:
        self._sessions = sessions
        self._path: str = args.health_check_endpoint
        self._interval_s: float = args.health_check_interval_secs
        self._timeout_s: float = args.health_check_timeout_secs
        self._failures: int = args.health_failure_threshold
        """In a row, they make an instance unhealthy: connections lost, time-outs, probes. A refused connection does at
        once."""
        self._successes: int = args.health_success_threshold
        self._probes_healthy = not args.disable_health_check
        self._silence_s: float = SILENCE * args.request_timeout_secs
        self.look_s = min(self._silence_s, self._timeout_s)
        """How often is looked whether a stream stands still (seconds)."""

    def answered(self, instance: Instance, status: int) -> None:
        """A request was answered with ``status``, or as if with it."""
        instance.failures = 0
        instance.heard()
        if status < 400:
            instance.proven = True
            instance.breaker.succeeded()
        elif status >= 500:
            instance.errors += 1
            instance.breaker.failed()

    def lost(self, instance: Instance, kind: Kind) -> None:
        """A request was lost at ``instance``, as ``upstream.Lost`` says."""
        instance.lost += 1
        if kind == "cut":
            # Its own verdict, which is not to be counted twice.
            return
        instance.breaker.failed()
        self._failed(instance, f"connection {kind}", at_once=kind == "refused")

    def silence_s(self, instance: Instance) -> float:
        """Longest pause of a stream from ``instance`` (seconds): one that answers no probe has no more time for it."""
        return self._silence_s if instance.healthy else self.look_s

    def timed_out(self, instance: Instance, began: float) -> None:
        """A request that was sent at ``began`` has run into its time limit; one that others were answered beside
        says nothing of the instance."""
        instance.errors += 1
        if instance.heard_at < began:
            instance.breaker.failed()
            self._failed(instance, "requests time out")

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
        if at_once or instance.failures >= self._failures:
            self._down(instance, why)
        instance.suspected.set()

    def _down(self, instance: Instance, why: str) -> None:
        if not instance.healthy:
            return
        instance.healthy = False
        # It will come back with an empty cache.
        instance.forget()
        logger.warning("%s %s is unhealthy: %s", instance.role, instance.url, why)
        instance.cut()

    def anew(self, instance: Instance) -> None:
        """Another process is there now, or nobody knows: it gets requests once it has answered probes, from now on."""
        instance.healthy, instance.unknown = False, True
        instance.forget()
        instance.suspected.set()

    async def watch(self, instance: Instance) -> None:
        """Probe at once, at each interval, and when the traffic gives reason to. Ends when cancelled."""
        due = self._next()
        if self._probes_healthy:
            await self._check(instance)
        else:
            instance.proven = True
        while True:
            if not instance.healthy:
                await self._heal(instance)
                due = self._next()
            instance.suspected.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(instance.suspected.wait(), min(self._timeout_s, self._interval_s))
            now = time.monotonic()
            silent = instance.outstanding > 0 and now - instance.heard_at >= self._timeout_s
            if self._probes_healthy and instance.healthy and (instance.suspected.is_set() or silent or now >= due):
                await self._check(instance)
                due = self._next()

    def _next(self) -> float:
        return time.monotonic() + _jittered(self._interval_s)

    async def _check(self, instance: Instance) -> None:
        """Probe until it answers well, or is known to be unhealthy. What the traffic says of it stands by itself."""
        bad = 0
        while instance.healthy:
            began = time.monotonic()
            try:
                why = await self._probe(instance)
            except Lost:
                return
            # A server that answers others meanwhile is busy and not gone.
            if why is None or instance.heard_at > began:
                instance.proven = True
                return
            bad += 1
            if bad >= self._failures:
                self._down(instance, why)
                return
            await asyncio.sleep(_jittered(min(self._timeout_s, self._interval_s)))

    async def _heal(self, instance: Instance) -> None:
        # An unhealthy instance is asked as often as a healthy one at least.
        first, last = min(PAUSE_S, self._interval_s), min(PAUSE_MAX_S, self._interval_s)
        pause, good = first, 0
        while good < self._successes:
            if not instance.unknown:
                instance.suspected.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(instance.suspected.wait(), _jittered(pause))
            if instance.unknown:
                instance.unknown, good, pause = False, 0, first
            try:
                why = await self._probe(instance)
            except Lost as e:
                why = str(e)
            good, pause = (good + 1, first) if why is None else (0, min(pause * GROWTH, last))
        instance.failures = 0
        instance.breaker.healed()
        instance.healthy = instance.proven = True
        logger.info("%s %s is healthy again", instance.role, instance.url)

    async def _probe(self, instance: Instance) -> str | None:
        """None when it is well, else what is wrong. Raises Lost when that could not be found out."""
        try:
            status, _ = await self._sessions.ask(instance, self._path.lstrip("/"), self._timeout_s)
            return None if status < 400 else f"{self._path} answered {status}"
        except (aiohttp.ClientError, OSError) as e:
            # TimeoutError is an OSError.
            fault = failure(instance, e)
            if fault.blameless:
                raise fault from e
            return f"{self._path}: {type(e).__name__}"


def _jittered(seconds: float) -> float:
    return seconds * (1 + JITTER * random.random())
