"""Replies the router makes itself, in the shape SGLang's own errors have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"


async def send_bytes(
    send: Send, status: int, body: bytes, content_type: bytes = JSON, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a whole reply."""
    fixed = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": fixed + (headers or [])})
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, kind: str, message: str) -> bytes:
    """``{"error": {...}}`` with one line that says what is wrong."""
    return orjson.dumps({"error": {"message": message, "type": kind, "code": status}})


async def send_error(send: Send, status: int, kind: str, message: str, *, close: bool = False) -> None:
    """Send an error; a 503 asks to try again in a second. ``close`` ends the connection with it."""
    headers = [(b"retry-after", b"1")] if status == 503 else []
    if close:
        headers.append((b"connection", b"close"))
    await send_bytes(send, status, error_body(status, kind, message), headers=headers)
