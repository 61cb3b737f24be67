"""Servers that join and leave the router, with the reader, breaker and health check of each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from functools import partial

from laps_core.config import ConfigError
from laps_core.pools.breaker import Breaker
from laps_core.pools.config import AllocConfig
from laps_core.pools.decode import DecodeInstance
from laps_core.pools.instances import Instance, Role
from laps_core.pools.paper import pools
from laps_core.pools.prefill import PrefillInstance
from sglang_router.router_args import RouterArgs

from .servers import tls
from .servers.discovery import Found
from .servers.discovery.sources import is_name, sources
from .servers.health import Health
from .servers.reader import KvReader
from .servers.signals import SignalReader
from .servers.upstream import Sessions, plain
from .tasks import Task, Tasks

logger = logging.getLogger(__name__)

FLAGS = "flags"
"""Source name of the servers on the command line."""
LOOK_S = 0.2
"""Period of the checks that a draining server has finished (seconds)."""
LINGER_S = 5.0
"""Time for which the connections of a drained server stay open (seconds), for the rest of a prefill server's reply and
for aborts."""


class Membership:
    """Lists of servers by role and state. The lists are changed in place, so that all holders see servers come and go.

    Raises ConfigError if the servers do not fit the configuration.
    """

    def __init__(self, args: RouterArgs, config: AllocConfig, tasks: Tasks) -> None:
        self.sources = sources(args)
        self.sessions = Sessions(tls.to_servers(args), args.api_key)
        self.health = Health(self.sessions, args)
        prefills = [(plain(url), port) for url, port in args.prefill_urls if not is_name(url)]
        decodes = [plain(url) for url in args.decode_urls if not is_name(url)]
        self.pools = pools(prefills, config, time.monotonic, decoders=decodes, fixed=not self.sources)
        self.instances: list[Instance] = []
        """All servers, draining ones included."""
        self.readers: list[SignalReader] = []
        """One reader for each prefill server that gets requests."""
        self.kv_readers: list[KvReader] = []
        """One reader for each decode server that gets requests."""
        self.source: dict[Instance, str] = {}
        """Source that named each server."""
        self.draining: dict[Instance, Task | None] = {}
        """Servers that get no new requests and finish the requests in flight, each with the task that drains it."""
        self._args = args
        self._tasks = tasks
        self._signal_s, self._threshold = config.sample_s, config.threshold
        self._found: dict[str, dict[str, Found]] = {}
        """Servers that each source named last: source -> URL -> server."""
        self._watchers: dict[Instance, Task | None] = {}
        self._open = False
        for i in (*self.pools.instances, *self.pools.decoders):
            self._equip(i, FLAGS)
            self._read(i)
        given = Counter([*(i.url for i in self.instances), *(source.name for source in self.sources)])
        twice = [url for url, n in given.items() if n > 1]
        if twice:
            raise ConfigError(f"{twice[0]} is given twice")

    def open(self) -> None:
        """Start watching servers and sources."""
        self._open = True
        self._tasks.keep("clock", self.health.watch_clock)
        for i in self.instances:
            self._watch(i)
        for source in self.sources:
            self._tasks.keep(f"discovery of {source.name}", partial(source.run, partial(self.follow, source.name)))

    def at(self, url: str) -> Instance | None:
        """Return the server at ``url`` that gets requests, else a draining server there, else None."""
        url = plain(url)
        return next(iter(sorted((i for i in self.instances if i.url == url), key=self.draining.__contains__)), None)

    def add(self, role: Role, url: str, bootstrap_port: int | None, source: str) -> Instance:
        """Return the server at ``url``, after adding it if necessary: it gets requests once its health checks pass. A
        draining server of the same kind is taken back. Raises ValueError if another kind of server is active there."""
        there = self.at(url)
        if there is not None:
            same = there.role == role and getattr(there, "bootstrap_port", None) == bootstrap_port
            if there not in self.draining:
                if not same:
                    raise ValueError(f"{there.url} is there already, as {there.role} server of {self.source[there]}")
                return there
            if same:
                self._stop(self.draining.pop(there))
                self._join(there, source)
                return there
        url, clock = plain(url), time.monotonic
        there = (
            PrefillInstance(url, bootstrap_port, self.pools.choose_pool(), clock=clock, learnt=self.pools.learnt)
            if role == "prefill"
            else DecodeInstance(url, clock)
        )
        self._equip(there, source)
        self._join(there, source)
        if self._open:
            self._watch(there)
        return there

    def remove(self, url: str) -> Instance | None:
        """Drain the server at ``url``, then remove it. Return the server, or None if no server is at ``url``."""
        there = self.at(url)
        if there is not None and there not in self.draining:
            logger.info("%s %s leaves: %d requests in flight", there.role, there.url, there.outstanding)
            self.pools.leave(there)
            self.readers[:] = [r for r in self.readers if r.instance is not there]
            self.kv_readers[:] = [r for r in self.kv_readers if r.instance is not there]
            self.draining[there] = self._tasks.spawn(self._drain(there))
        return there

    def follow(self, source: str, found: Collection[Found]) -> None:
        """Add and remove servers by the changes between the previous list of ``source`` and ``found``. A server that
        has not changed in the lists stays as other sources or the API have left it. A server that another source still
        names becomes a server of that source."""
        now = {f.url: f for f in sorted(found, key=lambda f: f.url)}
        before, self._found[source] = self._found.get(source, {}), now
        for url, old in before.items():
            there = self.at(url)
            naming = [s for s, known in self._found.items() if url in known and known[url].kind == old.kind]
            if there is None or self.source[there] != source or source in naming:
                continue
            if naming:
                self.source[there] = naming[0]
            else:
                self.remove(url)
        for url, new in now.items():
            if new == before.get(url):
                continue
            try:
                there = self.add(new.role, url, new.bootstrap_port, source)
            except ValueError as e:
                logger.warning("%s: %s", source, e)
                continue
            if url in before:
                # The process behind this URL has been replaced.
                self.health.reset(there)

    def _equip(self, i: Instance, source: str) -> None:
        args = self._args
        i.breaker = Breaker(
            time.monotonic,
            0 if args.disable_circuit_breaker else max(0, args.cb_failure_threshold),
            args.cb_success_threshold,
            args.cb_timeout_duration_secs,
            args.cb_window_duration_secs,
        )
        self.instances.append(i)
        self.source[i] = source

    def _join(self, i: Instance, source: str) -> None:
        logger.info("%s %s joins, named by %s", i.role, i.url, source)
        self.source[i] = source
        self.health.reset(i)
        self.pools.join(i)
        self._read(i)

    def _read(self, i: Instance) -> None:
        if isinstance(i, PrefillInstance):
            self.readers.append(SignalReader(i, self.sessions, self._signal_s, self._threshold))
        elif isinstance(i, DecodeInstance):
            self.kv_readers.append(KvReader(i, self.sessions, self._signal_s))

    def _watch(self, i: Instance) -> None:
        self._watchers[i] = self._tasks.keep(f"health of {i.url}", partial(self.health.watch, i))

    async def _drain(self, i: Instance) -> None:
        """Wait until the server's requests end, at most --request-timeout-secs, then remove the server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._args.request_timeout_secs):
                while i.outstanding:
                    await asyncio.sleep(LOOK_S)
        await asyncio.sleep(LINGER_S)
        self._stop(self._watchers.pop(i, None))
        del self.draining[i], self.source[i]
        self.instances.remove(i)
        await self.sessions.drop(i)
        logger.info("%s %s has left", i.role, i.url)

    @staticmethod
    def _stop(task: Task | None) -> None:
        if task is not None:
            task.cancel()
