"""Replies of servers and of the router to the client, and errors inside replies with status 200."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from laps_core.pools.instances import Instance
from starlette.types import Receive, Scope, Send

from ..memory import Hold
from .ids import Ids
from .trail import GONE, Trail

UNKNOWN = 500
ABORTED = "aborted by the prefill server"
ABORTED_TRANSFER = "aborted before the prompt's KV was transferred"
TRANSFER_FAILED = b"KVTransferError"
"""Name of SGLang's error for a failed KV transfer: the decode server may be gone."""
BY_ABORT = b"Aborted by AbortReq"
"""Reason that this error gives if somebody has asked for an abort."""
JSON = b"application/json"
INVALID = "invalid_request_error"
UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers that keep proxies from buffering a stream."""
EVENT_END = re.compile(rb"\n\n|\r\n\r\n")
"""Separator of a stream's events."""


@dataclass(slots=True)
class Reply:
    """A complete reply, from a server or from the router."""

    status: int
    content_type: bytes
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Further headers for the client."""

    @classmethod
    def of(cls, response: aiohttp.ClientResponse, body: bytes) -> Reply:
        """Return the reply of ``response`` and ``body``, with the server's Retry-After."""
        if response.status >= UNKNOWN and is_abort(body):
            # For SGLang an abort during the transfer is a failed transfer. It is to be neither retried nor blamed.
            return refusal(GONE, "abort", ABORTED_TRANSFER)
        after = response.headers.get("retry-after")
        headers = () if after is None else ((b"retry-after", after.encode("latin-1", "replace")),)
        return cls(response.status, content_type(response), body, headers)

    async def close(self, send: Send) -> None:
        """Send the reply as the last reply of its connection, without the end of the body."""
        self.headers = (*self.headers, (b"connection", b"close"))
        await self._send(send, more=True)

    async def __call__(self, scope: Scope | None, receive: Receive | None, send: Send) -> None:
        """Send the reply. The interface is that of starlette's responses, but the headers are raw bytes."""
        await self._send(send, more=False)

    async def _send(self, send: Send, *, more: bool) -> None:
        length = b"%d" % len(self.body)
        headers = [(b"content-type", self.content_type), (b"content-length", length), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": more})


def content_type(response: aiohttp.ClientResponse) -> bytes:
    """Return the content type of a server's reply."""
    return response.headers.get("content-type", "").encode("latin-1", "replace") or JSON


class Refused(Exception):
    """A server answered with an error."""

    def __init__(self, instance: Instance, reply: Reply) -> None:
        super().__init__(f"{instance.role} {instance.url} answered {reply.status}")
        self.instance = instance
        self.reply = reply

    @property
    def transfer_failed(self) -> bool:
        """Return True if the transfer between the two servers failed, rather than this server."""
        return self.reply.status >= 500 and TRANSFER_FAILED in self.reply.body

    @property
    def retryable(self) -> bool:
        """Return True if another server may answer better: this one is busy, or the KV transfer failed."""
        return self.reply.status == 503 or self.transfer_failed


class Rejection(Exception):
    """A request is answered with this error at once."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.body.decode())
        self.reply = reply


class BadRequest(Rejection):
    """A request is answered with status 400. The message names the error."""

    def __init__(self, message: str) -> None:
        super().__init__(refusal(400, INVALID, message))


def refusal(status: int, kind: str, message: str, after_s: int | None = None) -> Reply:
    """Return an error reply of the router. Retry-After is ``after_s``; for a 503 without ``after_s`` it is 1."""
    if status == 503 and after_s is None:
        after_s = 1
    headers = [] if after_s is None else [(b"retry-after", b"%d" % after_s)]
    return Reply(status, JSON, error_body(status, kind, message), headers)


def error_body(status: int, kind: str, message: str) -> bytes:
    """Return ``{"error": {...}}`` in SGLang's format, with a message of one line."""
    return orjson.dumps({"error": {"message": message, "type": kind, "code": status}})


def is_abort(error: bytes) -> bool:
    """Return True if the KV was not transferred because somebody asked for an abort."""
    return TRANSFER_FAILED in error and BY_ABORT in error


def fault(reply: bytes) -> Reply | None:
    """Return the first error in a reply or in a stream's events, as an error reply; None without an error."""
    # Nearly every reply returns here. A text that happens to hold these words costs only a parse.
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
    """Return the message of an error, as the server wrote it."""
    found = fault(reply)
    error = orjson.loads(found.body)["error"] if found else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else reply.decode(errors="replace")


def _error(item: Any) -> Reply | None:
    """Return the error in a JSON value of a reply, if any."""
    error, choices = _at(item, "error"), _at(item, "choices")
    if error:
        body = orjson.dumps({"error": error})
        if is_abort(body):
            return refusal(GONE, "abort", ABORTED_TRANSFER)
        return Reply(_status(_at(error, "code")), JSON, body)
    reason = _at(item, "meta_info", "finish_reason")
    if _at(reason, "type") == "abort":
        # SGLang gives no code if somebody asked for the abort: a failure of no server.
        status, message = _status(_at(reason, "status_code"), GONE), _at(reason, "message")
    elif isinstance(choices, list) and any(_at(choice, "finish_reason") == "abort" for choice in choices):
        status, message = GONE, None
    else:
        return None
    return Reply(status, JSON, error_body(status, "abort", message or ABORTED))


def _at(value: Any, *keys: str) -> Any:
    """Return the value under ``keys`` in nested objects; None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _status(code: Any, otherwise: int = UNKNOWN) -> int:
    known = isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599
    return code if known else otherwise


@dataclass(slots=True)
class Client:
    """Sender of replies to the client, with the client's own ids in the replies."""

    send: Send
    stream: bool
    """True if the client expects a stream."""
    ids: Ids
    trail: Trail
    hold: Hold
    hang_up: Callable[[], None]
    """Closes the client's connection."""
    started: bool = False
    """True once anything has been sent."""
    finished: bool = False
    """True once the last byte has been passed to the connection: from then on a disconnect is no abort."""
    waited_for: bool = False
    """True while the client has not read the part that was sent last."""

    async def send_reply(self, reply: Reply) -> None:
        """Send a whole reply. If a stream has started, end the stream with the reply as its last event."""
        if self.started:
            # The status line has been sent: a last event is all that a stream's reader can still understand.
            event = b"data: " + reply.body.replace(b"\n", b" ") + b"\n\n" if self.stream else b""
            await self.send_events(event, more=False)
            return
        self.started = self.finished = True
        self.trail.status = reply.status
        reply.body = self.ids.with_client_ids(reply.body)
        reply.headers = (*reply.headers, *self.trail.headers)
        await reply(None, None, self.send)

    async def send_head(self, status: int, content_type: bytes) -> None:
        """Send the head of a stream."""
        self.started = True
        self.trail.status = status
        headers = [(b"content-type", content_type), *UNBUFFERED, *self.trail.headers]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_events(self, part: bytes, *, more: bool = True) -> None:
        """Send whole events of the stream, or its end."""
        self.finished, self.waited_for = not more, True
        await self.send({"type": "http.response.body", "body": self.ids.with_client_ids(part), "more_body": more})
        self.waited_for = False

    async def refuse(self, status: int, kind: str, message: str, after_s: int | None = None) -> None:
        """Send an error of the router, even after the start of a stream."""
        await self.send_reply(refusal(status, kind, message, after_s))
