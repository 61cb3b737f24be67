"""The client's end of a request: what has gone there, and what still can."""

from __future__ import annotations

from starlette.types import Send

from .ids import Ids
from .replies import JSON, Reply, error_body


class Rejection(Exception):
    """A request that is answered with an error of the router's own."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    @property
    def reply(self) -> Reply:
        """A 503 asks to try again in a second, a 408 ends the connection."""
        headers = {503: [(b"retry-after", b"1")], 408: [(b"connection", b"close")]}.get(self.status, ())
        return Reply(self.status, JSON, error_body(self.status, self.kind, str(self)), headers)


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a whole reply, its headers as the bytes they are: starlette's Response takes them as text."""
    length = b"%d" % len(reply.body)
    headers = [(b"content-type", reply.content_type), (b"content-length", length), *reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


class Client:
    """Takes replies as servers send them; the client sees its own ids in them."""

    def __init__(self, send: Send, stream: bool, ids: Ids) -> None:
        self.started = False
        """Something has been sent."""
        self.finished = False
        """The last byte is on its way: the client may go."""
        self._send = send
        self._stream = stream
        self._ids = ids

    async def whole(self, reply: Reply) -> None:
        """All of it at once."""
        self.started = self.finished = True
        await send_reply(self._send, reply._replace(body=self._ids.as_asked(reply.body)))

    async def begin(self, status: int, content_type: bytes) -> None:
        """The head of a stream."""
        self.started = True
        headers = [(b"content-type", content_type)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, part: bytes) -> None:
        """Whole events of the stream."""
        await self._send({"type": "http.response.body", "body": self._ids.as_asked(part), "more_body": True})

    async def end(self, rest: bytes) -> None:
        """The end of the stream."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": self._ids.as_asked(rest)})

    async def refuse(self, status: int, kind: str, message: str) -> None:
        """An error of the router's own, whatever has been sent."""
        reply = Rejection(status, kind, message).reply
        if self.started:
            await self.break_off(reply.body)
        else:
            self.finished = True
            await send_reply(self._send, reply)

    async def break_off(self, error: bytes) -> None:
        """End what has begun."""
        # The status line is gone: a last event is what a stream's reader can still understand.
        event = b"data: " + self._ids.as_asked(error).replace(b"\n", b" ") + b"\n\n" if self._stream else b""
        await self._send({"type": "http.response.body", "body": event})
