"""Replies of servers and of the router, and errors inside a reply whose status line said that all is well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from ..servers.instances import Instance

UNKNOWN = 500
ABORTED = "aborted by the prefill server"
TRANSFER_FAILED = b"KVTransferError"
"""In SGLang's error where the KV could not be handed over: the decode server may be gone."""
JSON = b"application/json"


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

    async def __call__(self, scope: Scope | None, receive: Receive | None, send: Send) -> None:
        """Send it, as starlette's responses are sent, but its headers as the bytes they are."""
        length = b"%d" % len(self.body)
        headers = [(b"content-type", self.content_type), (b"content-length", length), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


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
    """A request that is answered with an error of the router's own."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        # A 503 asks to try again in a second, a 408 ends the connection.
        headers = {503: [(b"retry-after", b"1")], 408: [(b"connection", b"close")]}.get(status, ())
        self.reply = Reply(status, JSON, error_body(status, kind, message), headers)


def error_body(status: int, kind: str, message: str) -> bytes:
    """``{"error": {...}}`` as SGLang's own, with one line that says what is wrong."""
    return orjson.dumps({"error": {"message": message, "type": kind, "code": status}})


def fault(reply: bytes) -> Reply | None:
    """The first error in a whole reply or in a stream's events, as the reply it should have been; None without one."""
    # Nearly every reply is done with here; text that holds these words costs a parse and no more.
    if b'"error"' not in reply and b'"abort"' not in reply:
        return None
    for payload in _payloads(reply):
        for item in payload if isinstance(payload, list) else (payload,):
            found = _error(item) if isinstance(item, dict) else None
            if found is not None:
                return Reply(found[0], JSON, found[1])
    return None


def message_of(reply: bytes) -> str:
    """What an error says, in the words of the server."""
    found = fault(reply)
    error = orjson.loads(found.body)["error"] if found else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else reply.decode(errors="replace")


def _payloads(reply: bytes) -> Iterator[Any]:
    for event in reply.split(b"\n\n") if reply.startswith(b"data:") else (reply,):
        try:
            yield orjson.loads(event.removeprefix(b"data:"))
        except orjson.JSONDecodeError:
            continue


def _error(item: dict[str, Any]) -> tuple[int, bytes] | None:
    """(status, body) of an error in an object of a reply."""
    error = item.get("error")
    if error:
        return _status(error.get("code") if isinstance(error, dict) else None), orjson.dumps({"error": error})
    meta = item.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return _abort(_status(reason.get("status_code")), reason.get("message"))
    choices = item.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            return _abort(UNKNOWN, None)
    return None


def _abort(status: int, message: Any) -> tuple[int, bytes]:
    return status, error_body(status, "abort", message or ABORTED)


def _status(code: Any) -> int:
    known = isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599
    return code if known else UNKNOWN
