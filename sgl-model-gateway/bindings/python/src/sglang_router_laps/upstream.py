"""Connections to the servers: one pooled session for each, and the headers that travel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import aiohttp
from multidict import CIMultiDict

from .instances import Instance

KEEPALIVE_S = 4.0
"""Below the 5 s after which SGLang's own server closes an idle connection: the router must be the first to."""

DROPPED = frozenset(
    (
        b"host", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", b"connection",
        b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect", b"accept-encoding", b"user-agent",
    )
)  # fmt: skip
"""Request headers that belong to one hop, or that the rewritten body makes wrong."""


class Lost(Exception):
    """The connection to an instance failed: refused, reset, or closed before the reply was complete."""

    def __init__(self, instance: Instance, cause: BaseException) -> None:
        super().__init__(f"{instance.role} {instance.url}: {type(cause).__name__}: {cause}")
        self.instance = instance
        self.refused = isinstance(cause, aiohttp.ClientConnectorError)
        """Nobody listens there."""


class RawHeaders(aiohttp.ClientRequest):
    """Sends the bytes of headers as they came: aiohttp writes every header as UTF-8, clients need not."""

    async def write_bytes(self, writer: Any, *args: Any, **kwargs: Any) -> None:
        """Send the body, and before it the headers that wait for it."""
        waiting = getattr(writer, "_headers_buf", None)
        if waiting is not None and not waiting.isascii():
            # ``forwarded`` read each byte as the character with its number.
            writer._headers_buf = waiting.decode().encode("latin-1")
        await super().write_bytes(writer, *args, **kwargs)


class Sessions:
    """One client session per upstream, opened on first use."""

    def __init__(self, timeout_s: float, connect_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_timeout_s)
        self._open: dict[str, aiohttp.ClientSession] = {}

    def of(self, instance: Instance) -> aiohttp.ClientSession:
        """The session of ``instance``. Needs a running event loop."""
        session = self._open.get(instance.url)
        if session is None:
            session = self._open[instance.url] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                request_class=RawHeaders,
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            )
        return session

    async def close(self) -> None:
        """Close all connections."""
        for session in self._open.values():
            await session.close()
        self._open.clear()


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """The client's headers as the servers shall see them."""
    kept = CIMultiDict([("content-type", "application/json")])
    for name, value in headers:
        if name not in DROPPED:
            kept.add(name.decode("latin-1"), value.decode("latin-1"))
    return kept
