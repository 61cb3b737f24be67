"""Health of servers, judged by traffic and probes; unhealthy servers are probed with back-off until they recover.

The stock flags --health-* set period and time-out of probes, and how many failures or successes change the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from weakref import WeakKeyDictionary

import aiohttp
from laps_core.pools.instances import Instance
from sglang_router.router_args import RouterArgs

from .upstream import Kind, Lost, Sessions, address, failure

logger = logging.getLogger(__name__)

PAUSE_S, PAUSE_MAX_S = 0.5, 2.0
"""First and longest pause between probes of an unhealthy instance (seconds): a recovered instance should get requests
within five seconds."""
GROWTH = 1.5
JITTER = 0.3
"""Random share added to each pause, so that routers do not probe in step."""
REFUSAL_S = 2.0
"""Time limit for a connection that checks whether a server is still there (seconds)."""
LATE_S = 1.0
"""Lateness of a timer from which this router, or its machine, stood still (seconds)."""
SILENCE = 1 / 6
"""Longest pause of a stream, as a share of --request-timeout-secs: five minutes by default. A stream pauses while its
decode server, after a retraction, computes the KV again."""


class Health:
    """Health checks, which maintain ``Instance.healthy``."""

    def __init__(self, sessions: Sessions, args: RouterArgs) -> None:
        self._sessions = sessions
        self._path: str = args.health_check_endpoint
        self._interval_s: float = args.health_check_interval_secs
        self._timeout_s: float = args.health_check_timeout_secs
        self._failures: int = args.health_failure_threshold
        """Failures in a row that make an instance unhealthy: lost connections, time-outs, failed probes. A refused
        connection makes it unhealthy at once."""
        self._suspicions: WeakKeyDictionary[Instance, asyncio.Event] = WeakKeyDictionary()
        self._successes: int = args.health_success_threshold
        self._probes_healthy = not args.disable_health_check
        self._silence_s: float = SILENCE * args.request_timeout_secs
        self.look_s = min(self._silence_s, self._timeout_s)
        """Period of checks whether a stream stalls (seconds)."""
        self._late_at = -math.inf
        """Last time at which ``watch_clock`` woke up late (monotonic seconds)."""
        self._wakes_at = math.inf
        """Time at which ``watch_clock`` is to wake up (monotonic seconds)."""

    @property
    def stood_still(self) -> bool:
        """Return True if this router, or its machine, stood still a moment ago. Servers that look silent may have sent
        data that is not read yet."""
        now = time.monotonic()
        return now > self._wakes_at + LATE_S or now < self._late_at + 2 * LATE_S

    async def watch_clock(self) -> None:
        """Notice when this router stands still. Ends when cancelled."""
        while True:
            self._wakes_at = time.monotonic() + LATE_S / 2
            await asyncio.sleep(LATE_S / 2)
            if (now := time.monotonic()) > self._wakes_at + LATE_S:
                self._late_at = now

    def record_reply(self, instance: Instance, status: int) -> None:
        """Record a reply. ``status``: its HTTP status, or the status of an error inside the reply."""
        instance.failures = 0
        instance.heard()
        if status < 400:
            instance.proven = True
            instance.breaker.succeeded()
        elif status >= 500:
            instance.errors += 1
            instance.breaker.failed()

    def record_loss(self, instance: Instance, kind: Kind) -> None:
        """Record a request lost at ``instance``; ``kind`` as in ``upstream.Lost``."""
        instance.lost += 1
        if kind == "cut":
            # This router cut the connection to an instance already found unhealthy: do not count that twice.
            return
        instance.breaker.failed()
        self._failed(instance, f"connection {kind}", at_once=kind == "refused")

    def silence_s(self, instance: Instance) -> float:
        """Return the longest pause of a stream from ``instance`` (seconds). It is shorter if the instance is unhealthy,
        but long enough to move a virtual machine: a stream cannot be continued elsewhere."""
        return self._silence_s if instance.healthy else min(self._silence_s, self._failures * self.look_s)

    def record_timeout(self, instance: Instance, began: float) -> None:
        """Record the time-out of a request sent at ``began``. This is a failure of the instance only if the instance
        has sent no data since then."""
        instance.errors += 1
        if instance.heard_at < began and not self.stood_still:
            instance.breaker.failed()
            self._failed(instance, "requests time out")

    async def refuses(self, instance: Instance) -> bool:
        """Return True if nothing listens at ``instance`` any more, after marking the instance as unhealthy."""
        url = address(instance.url, "")
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
        self.suspect(instance)

    def _down(self, instance: Instance, why: str) -> None:
        if not instance.healthy:
            return
        instance.healthy = False
        # The instance's cache will be empty when the instance comes back.
        instance.forget()
        logger.warning("%s %s is unhealthy: %s", instance.role, instance.url, why)
        instance.cut()

    def reset(self, instance: Instance) -> None:
        """Treat ``instance`` as a new process: it gets requests once it passes new probes."""
        instance.healthy, instance.unknown = False, True
        instance.forget()
        self.suspect(instance)

    def suspect(self, instance: Instance) -> None:
        """Probe ``instance`` at once."""
        self._suspicion(instance).set()

    def _suspicion(self, instance: Instance) -> asyncio.Event:
        """Return the event that triggers a probe of ``instance``."""
        return self._suspicions.setdefault(instance, asyncio.Event())

    async def watch(self, instance: Instance) -> None:
        """Probe ``instance`` at once, at each interval, and when its traffic gives a reason. Ends when cancelled."""
        due, suspicion = self._next(), self._suspicion(instance)
        if self._probes_healthy:
            await self._check(instance)
        else:
            instance.proven = True
        while True:
            if not instance.healthy:
                await self._heal(instance)
                due = self._next()
            suspicion.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(suspicion.wait(), min(self._timeout_s, self._interval_s))
            now = time.monotonic()
            silent = instance.outstanding > 0 and now - instance.heard_at >= self._timeout_s
            if self._probes_healthy and instance.healthy and (suspicion.is_set() or silent or now >= due):
                await self._check(instance)
                due = self._next()

    def _next(self) -> float:
        return time.monotonic() + _jittered(self._interval_s)

    async def _check(self, instance: Instance) -> None:
        """Probe until the instance passes or is found unhealthy. Failures of its traffic are counted separately."""
        bad = 0
        while instance.healthy:
            began = time.monotonic()
            try:
                why = await self._probe(instance)
            except Lost:
                return
            # A server that answers other requests meanwhile is busy, not gone.
            if why is None or instance.heard_at > began:
                instance.proven = True
                return
            bad += not self.stood_still
            if bad >= self._failures:
                self._down(instance, why)
                return
            await asyncio.sleep(_jittered(min(self._timeout_s, self._interval_s)))

    async def _heal(self, instance: Instance) -> None:
        # Probe an unhealthy instance at least as often as a healthy one.
        first, last = min(PAUSE_S, self._interval_s), min(PAUSE_MAX_S, self._interval_s)
        pause, good, suspicion = first, 0, self._suspicion(instance)
        while good < self._successes:
            if not instance.unknown:
                suspicion.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(suspicion.wait(), _jittered(pause))
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
        """Return None if the probe succeeds, else the fault. Raises Lost if the fault is on this machine."""
        try:
            status, _ = await self._sessions.request(instance, self._path.lstrip("/"), self._timeout_s)
            return None if status < 400 else f"{self._path} answered {status}"
        except (aiohttp.ClientError, OSError) as e:
            # TimeoutError is an OSError.
            fault = failure(instance, e)
            if fault.blameless:
                raise fault from e
            return f"{self._path}: {type(e).__name__}"


def _jittered(seconds: float) -> float:
    return seconds * (1 + JITTER * random.random())
