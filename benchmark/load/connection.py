"""A cheap HTTP connection: requests are prepared beforehand, and replies are parsed no further than needed.

On a machine with two cores, a costly client would dominate the measurement of a closed loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

Done = Callable[["Connection", bool], None]
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Target:
    """Address of a server."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Return the URL without a slash at its end."""
        return f"http://{self.host}:{self.port}"


def request(body: dict[str, Any], path: bytes = b"/generate", headers: Mapping[str, str] | None = None) -> bytes:
    """Return a POST in wire format."""
    raw = orjson.dumps(body)
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (path, more, len(raw)) + raw


class Connection(asyncio.Protocol):
    """Keep-alive connection for one request at a time. ``done`` is called when the reply is complete or cut off."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.open = True
        self.first: float | None = None
        """Time of the first byte of the reply's body (``perf_counter``): the first token, with or without streaming."""
        self._buffer = b""
        self._body = 0
        self._end: int | None = None
        self._done: Done | None = None

    @classmethod
    async def to(cls, target: Target) -> Connection:
        """Open a connection. Raises OSError."""
        return (await asyncio.get_running_loop().create_connection(cls, target.host, target.port))[1]

    @property
    def said(self) -> str:
        """Return the start of the reply, for an error message."""
        return self._buffer[:300].decode(errors="replace") or "the connection was closed"

    @property
    def silent(self) -> bool:
        """Return True if nothing of the reply has arrived."""
        return not self._buffer

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, raw: bytes, done: Done) -> None:
        self._buffer, self._body, self._end, self.first, self._done = b"", 0, None, None, done
        self.transport.write(raw)

    async def answered(self, raw: bytes) -> bool:
        """Send a request; return True once the whole reply has arrived, False for an error or a closed connection."""
        end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.send(raw, lambda _, ok: None if end.done() else end.set_result(ok))
        return await end

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._body and not self._head():
            return
        if self.first is None and len(self._buffer) > self._body:
            self.first = time.perf_counter()
        whole = len(self._buffer) >= self._end if self._end is not None else self._buffer.endswith(LAST_CHUNK)
        if whole:
            # After a stream has started, SGLang reports an error in an event. A token can also be the word "error".
            fine = self._end is not None or b'{"error"' not in self._buffer
            self._finish(fine and self._buffer.startswith(b"HTTP/1.1 200"))

    def _head(self) -> bool:
        """Find the start and the end of the body; return True if the head is complete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lower = self._buffer[:end].lower()
        self._body = end + 4
        if (at := lower.find(b"content-length:")) >= 0:
            self._end = self._body + int(lower[at + 15 :].split(b"\r\n", 1)[0])
        return True

    def connection_lost(self, _: Exception | None) -> None:
        self.open = False
        self._finish(False)

    def _finish(self, ok: bool) -> None:
        done, self._done = self._done, None
        if done:
            done(self, ok)
