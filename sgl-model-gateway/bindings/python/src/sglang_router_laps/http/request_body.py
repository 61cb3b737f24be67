"""Reading a request's body: whole, of bounded size, from a client that keeps sending."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from ..request.client import Rejection

PAUSE_S = 30.0
"""A client that sends nothing for so long in the middle of a body is gone: TCP has sent again several times by then
(seconds)."""


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The whole body, of ``limit`` bytes at most.

    Raises ClientDisconnect, and Rejection: also where it takes longer than ``timeout_s`` or stands still for PAUSE_S.
    """
    too_large = Rejection(413, "payload_too_large", f"the body is larger than {limit} bytes")
    for name, value in scope["headers"]:
        # The server has checked that it is a number.
        if name == b"content-length" and int(value) > limit:
            raise too_large
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(min(PAUSE_S, timeout_s)) as patience:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientDisconnect
                chunk = message["body"]
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
                if not message.get("more_body"):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
                patience.reschedule(min(loop.time() + PAUSE_S, end))
    except TimeoutError:
        raise Rejection(408, "request_timeout", "the body did not arrive in time") from None


def replay(raw: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body once more, then goes on as before."""
    body: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def again() -> Message:
        return body.pop() if body else await receive()

    return again
