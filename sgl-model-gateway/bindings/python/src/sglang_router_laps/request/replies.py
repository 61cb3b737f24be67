"""Replies of servers and of the router on their way to the client, and errors inside replies that began well."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from ..memory import Hold
from ..servers.instances import Instance
from .ids import Ids
from .trail import Trail

UNKNOWN = 500
ABORTED = "aborted by the prefill server"
TRANSFER_FAILED = b"KVTransferError"
"""In SGLang's error where the KV could not be handed over: the decode server may be gone."""
JSON = b"application/json"
INVALID = "invalid_request_error"
UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers of a stream: what stands between the router and its reader is to pass events on as they come."""
EVENT_END = re.compile(rb"\n\n|\r\n\r\n")
"""Between the events of a stream."""


@dataclass(slots=True)
class Reply:
    """A whole reply, of a server or of the router."""

    status: int
    content_type: bytes
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ()
    """What else of the server's headers is for the client."""

    @classmethod
    def of(cls, response: aiohttp.ClientResponse, body: bytes) -> Reply:
        """``response`` with its ``body``. When to come back is the server's to say."""
        after = response.headers.get("retry-after")
        headers = () if after is None else ((b"retry-after", after.encode("latin-1", "replace")),)
        return cls(response.status, content_type(response), body, headers)

    async def close(self, send: Send) -> None:
        """Send it as the last of its connection, but for the end of the answer."""
        self.headers = (*self.headers, (b"connection", b"close"))
        await self._send(send, more=True)

    async def __call__(self, scope: Scope | None, receive: Receive | None, send: Send) -> None:
        """Send it, as starlette's responses are sent, but its headers as the bytes they are."""
        await self._send(send, more=False)

    async def _send(self, send: Send, *, more: bool) -> None:
        length = b"%d" % len(self.body)
        headers = [(b"content-type", self.content_type), (b"content-length", length), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": more})


def content_type(response: aiohttp.ClientResponse) -> bytes:
    """Of a server's reply."""
    return response.headers.get("content-type", "").encode("latin-1") or JSON


class Refused(Exception):
    """A server answered with an error."""

    def __init__(self, instance: Instance, reply: Reply) -> None:
        super().__init__(f"{instance.role} {instance.url} answered {reply.status}")
        self.instance = instance
        self.reply = reply

    @property
    def unjoined(self) -> bool:
        """Whether it was not this server that failed, but the way between the two."""
        return self.reply.status >= 500 and TRANSFER_FAILED in self.reply.body

    @property
    def elsewhere(self) -> bool:
        """Whether another server may answer better: this one is busy, or the pair of servers could not be joined."""
        return self.reply.status == 503 or self.unjoined


class Rejection(Exception):
    """A request that is answered at once, with this error."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.body.decode())
        self.reply = reply


class BadRequest(Rejection):
    """A request that the router answers 400. The message names what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(refusal(400, INVALID, message))


def refusal(status: int, kind: str, message: str, after_s: int | None = None) -> Reply:
    """An error of the router's own: a 503 asks to try again in a second, others after ``after_s`` if that is given."""
    if status == 503 and after_s is None:
        after_s = 1
    headers = [] if after_s is None else [(b"retry-after", b"%d" % after_s)]
    return Reply(status, JSON, error_body(status, kind, message), headers)


def error_body(status: int, kind: str, message: str) -> bytes:
    """``{"error": {...}}`` as SGLang's own, with one line that says what is wrong."""
    return orjson.dumps({"error": {"message": message, "type": kind, "code": status}})


def fault(reply: bytes) -> Reply | None:
    """The first error in a whole reply or in a stream's events, as the reply it should have been; None without one."""
    # Nearly every reply is done with here; text that holds these words costs a parse and no more.
    if b'"error"' not in reply and b'"abort"' not in reply:
        return None
    for event in EVENT_END.split(reply) if reply.startswith(b"data:") else (reply,):
        try:
            payload = orjson.loads(event.removeprefix(b"data:"))
        except orjson.JSONDecodeError:
            continue
        found = next(filter(None, map(_error, payload if isinstance(payload, list) else (payload,))), None)
        if found is not None:
            return found
    return None


def message_of(reply: bytes) -> str:
    """What an error says, in the words of the server."""
    found = fault(reply)
    error = orjson.loads(found.body)["error"] if found else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else reply.decode(errors="replace")


def _error(item: Any) -> Reply | None:
    """The error in a JSON value of a reply."""
    error, choices = _at(item, "error"), _at(item, "choices")
    if error:
        return Reply(_status(_at(error, "code")), JSON, orjson.dumps({"error": error}))
    reason = _at(item, "meta_info", "finish_reason")
    if _at(reason, "type") == "abort":
        status, message = _status(_at(reason, "status_code")), _at(reason, "message")
    elif isinstance(choices, list) and any(_at(choice, "finish_reason") == "abort" for choice in choices):
        status, message = UNKNOWN, None
    else:
        return None
    return Reply(status, JSON, error_body(status, "abort", message or ABORTED))


def _at(value: Any, *keys: str) -> Any:
    """What objects in objects hold there; None where there are none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _status(code: Any) -> int:
    known = isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599
    return code if known else UNKNOWN


@dataclass(slots=True)
class Client:
    """Takes replies as servers send them; the client sees its own ids in them."""

    send: Send
    stream: bool
    """Whether it expects one."""
    ids: Ids
    trail: Trail
    hold: Hold
    hang_up: Callable[[], None]
    """Ends its connection."""
    started: bool = False
    """Something has been sent."""
    finished: bool = False
    """The last byte is on its way: the client may go."""
    waited_for: bool = False
    """It has not taken what was sent last."""

    async def whole(self, reply: Reply) -> None:
        """All of it at once; where something has been sent already, that ends with what it says."""
        if self.started:
            # The status line is gone: a last event is what a stream's reader can still understand.
            event = b"data: " + reply.body.replace(b"\n", b" ") + b"\n\n" if self.stream else b""
            await self.go_on(event, more=False)
            return
        self.started = self.finished = True
        self.trail.status = reply.status
        reply.body = self.ids.as_asked(reply.body)
        reply.headers = (*reply.headers, *self.trail.headers)
        await reply(None, None, self.send)

    async def begin(self, status: int, content_type: bytes) -> None:
        """The head of a stream."""
        self.started = True
        self.trail.status = status
        headers = [(b"content-type", content_type), *UNBUFFERED, *self.trail.headers]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, part: bytes, *, more: bool = True) -> None:
        """Whole events of the stream, or its end."""
        self.finished, self.waited_for = not more, True
        await self.send({"type": "http.response.body", "body": self.ids.as_asked(part), "more_body": more})
        self.waited_for = False

    async def refuse(self, status: int, kind: str, message: str, after_s: int | None = None) -> None:
        """An error of the router's own, whatever has been sent."""
        await self.whole(refusal(status, kind, message, after_s))
