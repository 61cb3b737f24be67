"""Servers behind a DNS name that resolves to all their addresses, as a headless service's does."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

from laps_core.pools.instances import Role
from yarl import URL

from . import Follow, Found

logger = logging.getLogger(__name__)

SCHEME = "dns"
PERIOD_S = 1.0
"""Period of look-ups (seconds)."""


@dataclass(frozen=True, slots=True)
class Name:
    """Source for ``dns://host:port``, looked up periodically with the system's resolver."""

    role: Role
    url: str
    bootstrap_port: int | None = None

    @property
    def name(self) -> str:
        return self.url

    async def run(self, follow: Follow) -> None:
        """Look the name up until cancelled; see Source."""
        failing = False
        while True:
            try:
                follow(await self._look_up())
                failing = False
            except OSError as e:
                if not failing:
                    logger.warning("%s: %s; its servers stay unchanged", self.url, e)
                failing = True
            await asyncio.sleep(PERIOD_S)

    async def _look_up(self) -> list[Found]:
        url = URL(self.url)
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        # A server with an IPv4 and an IPv6 address must count once.
        family = min(f for f, *_ in found)
        hosts = sorted({str(address[0]) for f, *_, address in found if f == family})
        return [
            Found(self.role, str(URL.build(scheme="http", host=host, port=url.port)), self.bootstrap_port)
            for host in hosts
        ]
