"""Answers of fake servers, whole or streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

Body = dict[str, Any]


def rooms_of(body: Body) -> list[int]:
    room = body["bootstrap_room"]
    return room if isinstance(room, list) else [room]


def prompt_tokens(body: Body) -> int:
    """Return the number of prompt tokens: one per 4 bytes of text, or the number of ids."""
    if "input_ids" in body:
        ids = body["input_ids"]
        return sum(map(len, ids)) if isinstance(ids[0], list) else len(ids)
    text = body.get("text") or body.get("prompt") or json.dumps(body.get("messages"))
    if isinstance(text[0], int):
        return len(text)
    return max(1, sum(len(t) for t in ([text] if isinstance(text, str) else text)) // 4)


async def answer(
    request: web.Request, body: Body, pieces: list[Body], pause_s: float = 0.0, break_after: int | None = None
) -> web.StreamResponse:
    if not body.get("stream"):
        await asyncio.sleep(pause_s * len(pieces))
        batch = isinstance(body["bootstrap_room"], list) and "prompt" not in body
        return web.json_response([pieces[-1]] * len(rooms_of(body)) if batch else pieces[-1])
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for i, piece in enumerate(pieces):
        if i == break_after:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        await asyncio.sleep(pause_s)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
