"""Raw HTTP: send requests exactly as given, however wrong, and parse replies strictly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import h11

from benchmark.rig.servers import HOST

HEAD_LIMIT = 1 << 20
SMALL = 4096
"""Receive buffer of a slow reader (bytes)."""
LAST = b"data: [DONE]"
"""Event that ends a stream, also a failed one."""


class BrokenReply(Exception):
    """The reply is not HTTP, or ended too early."""


class Reply:
    """A reply: its status, and its body in ``pieces``."""

    def __init__(self, reader: asyncio.StreamReader, method: str) -> None:
        self._reader = reader
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
        # The sent bytes can be an invalid request, so give the parser a valid request with the same kind of reply.
        self._http.send(h11.Request(method=method, target="/", headers=[("host", HOST)]))
        self._http.send(h11.EndOfMessage())
        self.status = 0
        self.events = False
        """True if the body is a stream of server-sent events."""
        self.ended = False
        """True once the body is complete according to its own end marker."""
        self._json = False

    async def _next(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(1 << 16))
        except h11.RemoteProtocolError as e:
            raise BrokenReply(f"no whole reply: {e}") from None
        return event

    async def head(self) -> None:
        """Read up to the body. Raises Broken, OSError."""
        while isinstance(event := await self._next(), h11.InformationalResponse):
            pass
        self.status = event.status_code
        kind = dict(event.headers).get(b"content-type", b"")
        self.events, self._json = b"text/event-stream" in kind, b"json" in kind

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises Broken if it ends too early, OSError."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def body(self) -> bytes:
        """Return the whole body. Raises Broken, OSError."""
        return b"".join([piece async for piece in self.pieces()])

    async def values(self) -> AsyncIterator[Any]:
        """Yield the JSON value of each event, or of the whole body (None: no JSON). Raises Broken, OSError,
        ValueError."""
        if not self.events:
            body = await self.body()
            self.ended = True
            yield json.loads(body) if body and self._json else None
            return
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                if self.ended or not event.startswith(b"data: "):
                    raise BrokenReply(f"{'an event after the last one' if self.ended else 'no event'}: {event[:60]!r}")
                self.ended = event == LAST
                if not self.ended:
                    yield json.loads(event[6:])
        if rest.strip():
            raise BrokenReply(f"the stream ends within an event: {rest[-60:]!r}")


async def _connect(port: int, slow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not slow:
        return await asyncio.open_connection(HOST, port)
    sock = socket.socket()
    try:
        # Small segments, because the sender's kernel sizes its buffer by them: then about 170 KB are in flight.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (HOST, port))
        return await asyncio.open_connection(sock=sock, limit=SMALL)
    except BaseException:
        sock.close()
        raise


@contextlib.asynccontextmanager
async def exchange(port: int, raw: bytes, slow: bool = False) -> AsyncIterator[Reply]:
    """Send ``raw`` unchanged on a new connection and read the head of its reply. Raises Broken, OSError.

    ``slow``: use small buffers, so that unread bytes soon stop the sender.
    """
    reader, writer = await _connect(port, slow)
    try:
        # The server can answer a request and close the connection before the request is sent completely.
        with contextlib.suppress(OSError):
            writer.write(raw)
            await writer.drain()
        reply = Reply(reader, "HEAD" if raw.startswith(b"HEAD") else "POST")
        await reply.head()
        yield reply
    finally:
        with contextlib.suppress(OSError):
            writer.close()


def request(path: str, body: bytes, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    """Return a whole request in wire format."""
    lines = {"host": HOST, "content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def reason(body: bytes) -> str:
    """Return the message of an error reply; empty if there is none."""
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body.decode("utf-8", "replace").strip()[:300]


def error_message(value: Any) -> str:
    """Return the message in an error object of SGLang, of the router or of FastAPI."""
    while isinstance(value, dict):
        value = next((value[k] for k in ("error", "message", "detail") if value.get(k)), None)
    return str(value)[:300] if value else ""
