"""Replies the router makes itself, in the shape SGLang's own errors have."""

from __future__ import annotations

import orjson
from starlette.types import Send

JSON = b"application/json"


class Rejection(Exception):
    """A request that is answered with an error at once."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


async def send_bytes(
    send: Send, status: int, body: bytes, content_type: bytes = JSON, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a whole reply, its headers as the bytes they are: starlette's Response takes them as text."""
    fixed = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": fixed + (headers or [])})
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, kind: str, message: str) -> bytes:
    """``{"error": {...}}`` with one line that says what is wrong."""
    return orjson.dumps({"error": {"message": message, "type": kind, "code": status}})


async def send_error(send: Send, status: int, kind: str, message: str) -> None:
    """Send an error: a 503 asks to try again in a second, a 408 ends the connection."""
    headers = {503: [(b"retry-after", b"1")], 408: [(b"connection", b"close")]}.get(status)
    await send_bytes(send, status, error_body(status, kind, message), headers=headers)
