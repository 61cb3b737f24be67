"""Connections to the servers: a pooled session for each, forwarded headers, and classification of failures."""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakSet

import aiohttp
from laps_core.pools.instances import Instance
from multidict import CIMultiDict
from yarl import URL

logger = logging.getLogger(__name__)

KEEPALIVE_S = 4.0
"""Idle time of connections (seconds): the router must close them first, and SGLang closes them after 5 s."""
CONNECT_S = 5.0
"""Longest wait for a connection (seconds): enough to retransmit three lost packets."""

ADDRESSES = 4096
"""Number of parsed URLs that are kept in the cache."""

DROPPED = frozenset(
    (
        b"host", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", b"connection",
        b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect", b"accept-encoding", b"user-agent",
    )
)  # fmt: skip
"""Request headers that are for a single hop, or that are wrong for the rewritten body."""

OVERRIDES = b"x-override-"
"""Prefix of headers by which SGLang overrides members of the body, including members that the router sets: bootstrap
host, port and room, id and rank."""

Answer = tuple[int, bytes]
"""Status and body of a server's reply."""
Kind = Literal["refused", "unreachable", "lost", "cut", "local", "exhausted"]

KINDS: dict[int | None, Kind] = {
    **dict.fromkeys((errno.ECONNREFUSED, errno.ECONNRESET), "refused"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM), "exhausted"),
    **dict.fromkeys(
        (errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.ENETDOWN, errno.ENETUNREACH, errno.EACCES, errno.EPERM), "local"
    ),
}
"""Kind of each connect error; all other errors are unreachable."""


@lru_cache(maxsize=ADDRESSES)
def address(url: str, path: str) -> URL:
    return URL(f"{url}/{path}")


def plain(url: str) -> str:
    """Return the spelling of ``url`` by which servers are compared: in small letters, without a default port."""
    return str(address(url.rstrip("/"), "")).rstrip("/")


@lru_cache(maxsize=ADDRESSES)
def bootstrap_host(url: str) -> str:
    """Return the host of the prefill server at ``url``, in the form for decode servers."""
    return URL(url).host_subcomponent or ""


class Lost(Exception):
    """An instance could not be reached, or its connection ended before the reply was complete."""

    def __init__(self, instance: Instance, kind: Kind, why: str) -> None:
        super().__init__(f"{instance.role} {instance.url}: {why}")
        self.instance = instance
        self.kind: Kind = kind
        """refused: nothing listens there. unreachable: the connection attempt got no answer. lost: the connection ended
        early. cut: this router ended the connection, because the instance had become unhealthy. local: this machine
        could make no connection (name, port, TLS). exhausted: this machine has no descriptors or memory to connect to
        any server."""

    @property
    def sent(self) -> bool:
        """Return True if the instance may have started work on the request."""
        return self.kind in ("lost", "cut")

    @property
    def blameless(self) -> bool:
        """Return True if the failure says nothing about the instance."""
        return self.kind in ("local", "exhausted")


def failure(instance: Instance, cause: Exception) -> Lost:
    """Return the failure that corresponds to an exception of a request to ``instance``."""
    kind: Kind = "unreachable" if isinstance(cause, aiohttp.ServerTimeoutError) else "lost"
    if isinstance(cause, (aiohttp.ClientConnectorDNSError, aiohttp.ClientSSLError)):
        kind = "local"
    elif isinstance(cause, aiohttp.ClientConnectorError):
        kind = KINDS.get(cause.errno, "unreachable")
    return Lost(instance, kind, f"{type(cause).__name__}: {cause}")


class Request(aiohttp.ClientRequest):
    """Request with unchanged header bytes: aiohttp writes headers as UTF-8, but a client's need not be UTF-8."""

    reused = False
    """True if the connection has carried other requests."""
    needs_new = False
    """True if the request needs a new connection."""

    async def write_bytes(self, writer: Any, *args: Any, **kwargs: Any) -> None:
        """Send the body, preceded by the buffered headers."""
        waiting = getattr(writer, "_headers_buf", None)
        if waiting is not None and not waiting.isascii():
            # ``forwarded`` decoded each byte as Latin-1.
            writer._headers_buf = waiting.decode().encode("latin-1")
        await super().write_bytes(writer, *args, **kwargs)


class Connector(aiohttp.TCPConnector):
    """Connections to one server. A request can ask for a new one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEPALIVE_S, **options)
        self._used: WeakSet[Any] = WeakSet()

    async def connect(self, req: Any, *args: Any, **more: Any) -> Any:
        """Return a connection for ``req``, after closing all that are idle if ``req`` needs a new one."""
        while True:
            connection = await super().connect(req, *args, **more)
            req.reused = connection.protocol in self._used
            if not (req.reused and req.needs_new):
                self._used.add(connection.protocol)
                return connection
            connection.close()


async def send_again(req: Any, send: Callable[[Any], Awaitable[aiohttp.ClientResponse]]) -> aiohttp.ClientResponse:
    """Send ``req``, and once more on a new connection if the server had closed the idle one that was used.

    A server closes a connection that has been idle for some seconds, perhaps while a request is on its way: if the
    server, this router or their machine stands still for a moment, all idle connections are closed at once. Without
    this, the server would pass for broken.
    """
    try:
        return await send(req)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError) as e:
        if not req.reused:
            raise
        req.needs_new = True
        try:
            return await send(req)
        except aiohttp.ClientConnectorError:
            # The server has died, perhaps of this request.
            raise e from None


class Sessions:
    """Client sessions, one per server, opened on first use."""

    def __init__(self, tls: ssl.SSLContext | bool = True, api_key: str | None = None) -> None:
        self._tls = tls
        self.key = f"Bearer {api_key}" if api_key else None
        """Authorization of the router's own queries."""
        self._open: dict[Instance, aiohttp.ClientSession] = {}

    def of(self, instance: Instance) -> aiohttp.ClientSession:
        """Return the session of ``instance``. Needs a running event loop."""
        session = self._open.get(instance)
        if session is None:
            session = self._open[instance] = aiohttp.ClientSession(
                connector=Connector(ssl=self._tls),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_S),
                request_class=Request,
                middlewares=(send_again,),
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            )
        return session

    async def request(
        self, instance: Instance, path: str, timeout_s: float, key: str | None = None, method: str = "GET", **more: Any
    ) -> Answer:
        """Send a query of the router itself, with ``key`` as its authorization. Raises aiohttp.ClientError and
        OSError."""
        headers = {"authorization": key} if key else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self.of(instance).request(
            method, address(instance.url, path), headers=headers, timeout=timeout, **more
        ) as response:
            return response.status, await response.read()

    async def post(
        self, instance: Instance, path: str, key: str | None, timeout_s: float, body: Any = None
    ) -> Answer | None:
        """POST ``body`` and return the answer; None if ``instance`` is not reached."""
        try:
            return await self.request(instance, path, timeout_s, key, "POST", json=body)
        except (aiohttp.ClientError, OSError) as e:
            logger.debug("%s at %s: %s", path, instance.url, e)
            return None

    async def drop(self, instance: Instance) -> None:
        session = self._open.pop(instance, None)
        if session is not None:
            await session.close()

    async def close(self) -> None:
        for instance in list(self._open):
            await self.drop(instance)


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """Return the client's headers as the servers should see them."""
    kept = CIMultiDict([("content-type", "application/json")])
    named = []
    for name, value in headers:
        if name not in DROPPED and not name.startswith(OVERRIDES):
            kept.add(name.decode("latin-1"), value.decode("latin-1"))
        elif name == b"connection":
            named += value.decode("latin-1").split(",")
    for one in named:
        # Headers named by Connection are for this hop only (RFC 9110, s7.6.1).
        if one.strip().lower() != "content-type":
            kept.popall(one.strip(), None)
    return kept
