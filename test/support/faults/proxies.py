"""TCP proxy in front of each server: it forwards, refuses, resets, hangs, falls silent, or answers 5xx itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import select
import socket
import struct
from typing import Any

from benchmark.rig.servers import HOST
from faults.evidence import DIED, HANG, MARKER, STORM_WORDS, Evidence

PASS, REFUSE, RESET, SILENT, STORM = "pass", "refuse", "reset", "silent", "storm"
STATUSES = {500: "Internal Server Error", 502: "Bad Gateway", 503: "Service Unavailable"}
HEAD_LIMIT = 1 << 20
PROBE = b"GET /health "
LAST_CHUNK = b"0\r\n\r\n"
"""End of a chunked reply."""
_NUMBER = re.compile(rb"\r\n%b: *(\d+)\r\n" % MARKER.encode(), re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Link:
    """One connection of the router and, once needed, the connection to the server behind the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.up: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.back: asyncio.Task[None] | None = None
        self.marker: int | None = None
        """Number of the current request."""
        self.answered = True
        """True if the last request has been fully answered."""
        self.probed: float | None = None
        """Time at which a health probe was forwarded (monotonic seconds); None if no probe is open."""
        self.chunks_left: int | None = None
        """Chunks of the reply to forward before a reset; None: no reset."""
        self.events_left: int | None = None
        """Event chunks of a stream to forward before the stream hangs; None: the stream does not hang."""
        self._owed: int | None = None
        """Bytes missing from a reply of known length; None if the reply ends with a last chunk."""

    def track_reply(self, data: bytes) -> None:
        """Track how much of the reply is missing after this chunk."""
        if data.startswith(b"HTTP/1."):
            head, _, data = data.partition(b"\r\n\r\n")
            length = _LENGTH.search(head + b"\r\n")
            self._owed = int(length[1]) if length else None
        if self._owed is not None:
            self._owed -= len(data)
            self.answered = self._owed <= 0
        else:
            self.answered = data.endswith(LAST_CHUNK)

    def has_unread_bytes(self) -> bool:
        """Return True if bytes have come that nobody has read."""
        waiting: Any = self.reader
        connection = self.writer.get_extra_info("socket")
        # A lost connection is already closed here.
        arrived, *_ = select.select([connection] if connection.fileno() >= 0 else [], [], [], 0.0)
        return bool(waiting._buffer or arrived)

    def end(self, *, abrupt: bool) -> None:
        """Close both connections; ``abrupt``: with an RST."""
        if self.back:
            self.back.cancel()
        for writer in (self.writer, self.up[1] if self.up else None):
            if writer is None or writer.transport.is_closing():
                continue
            if abrupt:
                with contextlib.suppress(OSError):
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()


class Proxy:
    """Proxy of one local server, on its own port. The mode at a request's arrival decides how it is treated."""

    def __init__(self, name: str, port: int, server_port: int, evidence: Evidence, seed: int = 0) -> None:
        self.name, self.port = name, port
        self._server_port = server_port
        self._evidence = evidence
        self._rng = random.Random(seed)
        self._listener: asyncio.Server | None = None
        self._socket: socket.socket | None = None
        self._late: set[asyncio.Task[None]] = set()
        """Connections that the kernel accepted and nobody had taken when the proxy began to refuse."""
        self._links: set[Link] = set()
        self._mode = PASS
        self._not_silent = asyncio.Event()
        self._not_silent.set()

    @property
    def url(self) -> str:
        """Return the URL by which the router reaches the server."""
        return f"http://{HOST}:{self.port}"

    async def listen(self) -> None:
        """Accept connections."""
        if self._listener is None:
            self._socket = socket.create_server((HOST, self.port))
            self._listener = await asyncio.start_server(self._accept, sock=self._socket, limit=HEAD_LIMIT)

    def refuse(self) -> None:
        """Stop accepting: the kernel refuses new connections; kept connections are reset when they bring a request.

        No request is reset before its number is read: otherwise no evidence would excuse its router.
        """
        if self._listener is not None and self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken = asyncio.ensure_future(self._take(self._socket.accept()[0]))
                    self._late.add(taken)
                    taken.add_done_callback(self._late.discard)
            self._listener.close()
            self._listener = self._socket = None
        for link in [link for link in self._links if link.answered and not link.has_unread_bytes()]:
            link.end(abrupt=True)

    async def _take(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await self._accept(*await asyncio.open_connection(sock=connection, limit=HEAD_LIMIT))

    async def mode(self, mode: str) -> None:
        """Set the mode for requests from now on. The end of silence resets all connections, as after a reboot."""
        was, self._mode = self._mode, mode
        if mode == REFUSE:
            self.refuse()
        elif mode == SILENT:
            self._not_silent.clear()
            for link in self._links:
                if not link.answered:
                    self._evidence.note(link.marker, self.name, SILENT)
        elif was == REFUSE:
            await self.listen()
        elif was == SILENT:
            for link in list(self._links):
                link.end(abrupt=True)
            self._not_silent.set()

    async def close(self) -> None:
        """Close everything."""
        self.refuse()
        while self._links or self._late:
            for link in list(self._links):
                link.end(abrupt=True)
            await asyncio.sleep(0.01)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        self._links.add(link)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = _LENGTH.search(head)
                    body = await reader.readexactly(int(length[1])) if length else b""
                    number = _NUMBER.search(head)
                    link.marker, link.answered, link.chunks_left = int(number[1]) if number else None, False, None
                    await self._handle(link, head + body)
        finally:
            self._record_probe(link)
            link.end(abrupt=False)
            self._links.discard(link)

    def _record_probe(self, link: Link) -> None:
        """Record that a probe was answered, or given up by the router."""
        if link.probed is not None:
            self._evidence.record_probe(self.name, link.probed)
            link.probed = None

    async def _handle(self, link: Link, request: bytes) -> None:
        if self._listener is None:
            self._evidence.note(link.marker, self.name, DIED)
            link.end(abrupt=True)
            raise ConnectionResetError
        if self._mode == SILENT:
            self._evidence.note(link.marker, self.name, SILENT)
            # Until the end of silence resets the connection, or the router gives up.
            await link.reader.read()
            raise ConnectionResetError
        if self._mode == STORM:
            self._evidence.note(link.marker, self.name, STORM)
            link.writer.write(_storm_reply(self._rng.choice(list(STATUSES))))
            await link.writer.drain()
            link.answered = True
            return
        link.events_left = self._rng.randint(1, 4) if self._mode == HANG else None
        if self._mode == RESET:
            link.chunks_left = self._rng.choice((0, 0, 1, 2, 4))
            if not link.chunks_left:
                self._evidence.note(link.marker, self.name, RESET)
                link.end(abrupt=True)
                raise ConnectionResetError
        await self._forward(link, request)

    async def _forward(self, link: Link, request: bytes) -> None:
        if link.up is None:
            try:
                link.up = await asyncio.open_connection(HOST, self._server_port, limit=HEAD_LIMIT)
            except OSError:
                link.end(abrupt=True)
                raise
            link.back = asyncio.ensure_future(self._forward_replies(link, link.up[0]))
        self._evidence.note(link.marker, self.name, "sent")
        link.probed = self._evidence.clock() if request.startswith(PROBE) else None
        link.up[1].write(request)
        await link.up[1].drain()

    async def _forward_replies(self, link: Link, reader: asyncio.StreamReader) -> None:
        """Forward the server's replies."""
        try:
            while data := await reader.read(1 << 16):
                self._record_probe(link)
                await self._not_silent.wait()
                if not link.answered and data.startswith(b"HTTP/1."):
                    self._evidence.note(link.marker, self.name, f"answered {data[9:12].decode('latin-1')}")
                if link.chunks_left is not None:
                    link.chunks_left -= 1
                    if link.chunks_left < 0:
                        self._evidence.note(link.marker, self.name, RESET)
                        link.end(abrupt=True)
                        return
                if link.events_left is not None and b"data: " in data:
                    link.events_left -= 1
                    if link.events_left < 0 and not data.endswith(LAST_CHUNK):
                        self._evidence.note(link.marker, self.name, HANG)
                        # Keep reading from the server and forward nothing; the router may close the connection.
                        while await reader.read(1 << 16):
                            pass
                        return
                link.writer.write(data)
                if b"data: " in data:
                    self._evidence.record_chunk(link.marker, self.name)
                await link.writer.drain()
                link.track_reply(data)
            await self._not_silent.wait()
            link.end(abrupt=False)
        except OSError:
            link.end(abrupt=True)


def _storm_reply(status: int) -> bytes:
    body = b'{"error": {"message": "%b", "type": "storm", "code": %d}}' % (STORM_WORDS.encode(), status)
    head = (
        f"HTTP/1.1 {status} {STATUSES[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
