"""HTTP/1.1 by hand: what is sent is exactly what is asked for, however wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.rig.servers import HOST

HEAD_LIMIT = 1 << 20


class Broken(Exception):
    """The reply is not HTTP, or ended too early."""


@dataclass
class Reply:
    """Status line and headers of a reply; its body is read from ``pieces``."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Broken where it ends too early."""
        read = self.reader
        try:
            if "chunked" in self.headers.get("transfer-encoding", ""):
                while size := int((await read.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await read.readexactly(size + 2))[:-2]
                await read.readuntil(b"\r\n")
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left:
                    data = await read.read(min(left, 1 << 16))
                    if not data:
                        raise Broken(f"{left} bytes of the body did not come")
                    left -= len(data)
                    yield data
            elif self.status >= 200 and self.status not in (204, 304):
                while data := await read.read(1 << 16):
                    yield data
        except asyncio.IncompleteReadError:
            raise Broken("the connection ended within a chunk") from None
        except ValueError as e:
            raise Broken(f"no chunk: {e}") from None

    async def body(self) -> bytes:
        """All of the body. Raises Broken."""
        return b"".join([piece async for piece in self.pieces()])


class Connection:
    """One connection; ``close`` or a ``with`` block ends it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> Connection:
        """To a port of loopback. Raises OSError."""
        return cls(*await asyncio.open_connection(HOST, port, limit=HEAD_LIMIT))

    async def send(self, raw: bytes) -> None:
        """As it is. Raises OSError."""
        self._writer.write(raw)
        await self._writer.drain()

    async def reply(self) -> Reply:
        """The next reply. Raises Broken or OSError."""
        try:
            while True:
                head = await self._reader.readuntil(b"\r\n\r\n")
                line, *lines = head[:-4].decode("latin-1").split("\r\n")
                status = int(line.split(" ")[1])
                pairs = (x.partition(":") for x in lines)
                headers = {k.strip().lower(): v.strip() for k, _, v in pairs}
                if status != 100:
                    return Reply(status, headers, self._reader)
        except asyncio.IncompleteReadError as e:
            raise Broken(f"closed without a reply{f' after {e.partial[:60]!r}' if e.partial else ''}") from None
        except (ValueError, IndexError, asyncio.LimitOverrunError) as e:
            raise Broken(f"no HTTP reply: {type(e).__name__}") from None

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._writer.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def request(path: str, body: bytes, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    """A whole request as it goes over the wire."""
    lines = {"host": HOST, "content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of the server-sent events in a body. Raises Broken at an event that is none, or is cut."""
    rest = b""
    async for piece in pieces:
        rest += piece
        while b"\n\n" in rest:
            event, _, rest = rest.partition(b"\n\n")
            if not event.startswith(b"data: "):
                raise Broken(f"an event that begins with {event[:40]!r}")
            yield event[6:]
    if rest.strip():
        raise Broken(f"the stream ends within an event: {rest[-60:]!r}")


def reason(body: bytes) -> str:
    """What an error reply says is wrong; empty where it says nothing."""
    try:
        said = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()[:300]
    return told(said)


def told(said: Any) -> str:
    """The message in an error object of SGLang, of the router or of FastAPI."""
    while isinstance(said, dict):
        inner = next((said[k] for k in ("error", "message", "detail") if said.get(k)), None)
        if inner is None:
            return ""
        said = inner
    return str(said)[:300] if said else ""
