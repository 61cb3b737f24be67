"""The client's end of a request: what has gone there, and what still can."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Send

from .ids import Ids
from .replies import Rejection, Reply


@dataclass(slots=True)
class Client:
    """Takes replies as servers send them; the client sees its own ids in them."""

    send: Send
    stream: bool
    """Whether it expects one."""
    ids: Ids
    started: bool = False
    """Something has been sent."""
    finished: bool = False
    """The last byte is on its way: the client may go."""

    async def whole(self, reply: Reply) -> None:
        """All of it at once."""
        self.started = self.finished = True
        reply.body = self.ids.as_asked(reply.body)
        await reply(None, None, self.send)

    async def begin(self, status: int, content_type: bytes) -> None:
        """The head of a stream."""
        self.started = True
        headers = [(b"content-type", content_type)]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, part: bytes) -> None:
        """Whole events of the stream."""
        await self.send({"type": "http.response.body", "body": self.ids.as_asked(part), "more_body": True})

    async def end(self, rest: bytes) -> None:
        """The end of the stream."""
        self.finished = True
        await self.send({"type": "http.response.body", "body": self.ids.as_asked(rest)})

    async def refuse(self, status: int, kind: str, message: str) -> None:
        """An error of the router's own, whatever has been sent."""
        reply = Rejection(status, kind, message).reply
        if self.started:
            await self.break_off(reply.body)
        else:
            self.finished = True
            await reply(None, None, self.send)

    async def break_off(self, error: bytes) -> None:
        """End what has begun."""
        # The status line is gone: a last event is what a stream's reader can still understand.
        event = b"data: " + self.ids.as_asked(error).replace(b"\n", b" ") + b"\n\n" if self.stream else b""
        await self.send({"type": "http.response.body", "body": event})
