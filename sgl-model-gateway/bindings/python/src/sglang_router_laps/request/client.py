"""The client's end of a request: what has gone there, and what still can."""

from __future__ import annotations

from starlette.types import Send

from .faults import Reply
from .ids import Ids
from .replies import error_body, send_bytes, send_error


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
        await send_bytes(self._send, reply.status, self._ids.as_asked(reply.body), reply.content_type, reply.headers)

    async def begin(self, status: int, content_type: bytes) -> None:
        """The head of a stream."""
        self.started = True
        headers = [(b"content-type", content_type)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, part: bytes) -> None:
        """Whole events of the stream."""
        if self._ids.renamed:
            part = self._ids.as_asked(part)
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self, rest: bytes) -> None:
        """The end of the stream."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": self._ids.as_asked(rest)})

    async def refuse(self, status: int, kind: str, message: str) -> None:
        """An error of the router's own, whatever has been sent."""
        if self.started:
            await self.break_off(error_body(status, kind, message))
        else:
            self.finished = True
            await send_error(self._send, status, kind, message)

    async def break_off(self, error: bytes) -> None:
        """End what has begun."""
        # The status line is gone: a last event is what a stream's reader can still understand.
        event = b"data: " + self._ids.as_asked(error).replace(b"\n", b" ") + b"\n\n" if self._stream else b""
        await self._send({"type": "http.response.body", "body": event})
