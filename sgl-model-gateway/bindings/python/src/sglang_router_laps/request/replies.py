"""Errors: answers of servers that are one, and errors inside a reply whose status line said that all is well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from ..servers.instances import Instance

UNKNOWN = 500
ABORTED = "aborted by the prefill server"
TRANSFER_FAILED = b"KVTransferError"
"""In SGLang's error where the KV could not be handed over: the decode server may be gone."""

Headers = list[tuple[bytes, bytes]]


class Reply(NamedTuple):
    """A whole reply of a server."""

    status: int
    content_type: bytes
    body: bytes
    headers: Headers
    """What else of the server's headers is for the client."""


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


class Fault(NamedTuple):
    """An error inside a reply."""

    status: int
    body: bytes
    """``{"error": ...}``."""
    message: str
    """What it says; empty where it says nothing."""


def fault(reply: bytes) -> Fault | None:
    """The first error in a whole reply or in a stream's events; None without one."""
    # Nearly every reply is done with here; text that holds these words costs a parse and no more.
    if b'"error"' not in reply and b'"abort"' not in reply:
        return None
    for payload in _payloads(reply):
        for item in payload if isinstance(payload, list) else (payload,):
            found = _error(item) if isinstance(item, dict) else None
            if found is not None:
                return found
    return None


def message_of(reply: bytes) -> str:
    """What an error says, in the words of the server."""
    found = fault(reply)
    return found.message if found and found.message else reply.decode(errors="replace")


def _payloads(reply: bytes) -> Iterator[Any]:
    for event in reply.split(b"\n\n") if reply.startswith(b"data:") else (reply,):
        try:
            yield orjson.loads(event.removeprefix(b"data:"))
        except orjson.JSONDecodeError:
            continue


def _error(item: dict[str, Any]) -> Fault | None:
    error = item.get("error")
    if error:
        code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        return Fault(_status(code), orjson.dumps({"error": error}), str(message or ""))
    meta = item.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return _abort(_status(reason.get("status_code")), reason.get("message") or ABORTED)
    choices = item.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            return _abort(UNKNOWN, ABORTED)
    return None


def _abort(status: int, message: Any) -> Fault:
    return Fault(status, orjson.dumps({"error": {"message": message, "type": "abort", "code": status}}), str(message))


def _status(code: Any) -> int:
    known = isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599
    return code if known else UNKNOWN
