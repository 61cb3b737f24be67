"""``POST /flush_cache``: to every healthy server; the answer is the first bad one, if any."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from ..request.replies import Scope, Send, send_bytes, send_error
from ..servers.instances import Instance
from ..servers.upstream import Sessions

PATH = "flush_cache"
TIMEOUT_S = 30.0


async def serve(sessions: Sessions, instances: Sequence[Instance], scope: Scope, send: Send) -> None:
    """Answer the client with what the servers say. One that is not reached counts for nothing: its cache is gone."""
    key = dict(scope["headers"]).get(b"authorization")
    headers = {"authorization": key.decode("latin-1")} if key else {}

    async def ask(instance: Instance) -> tuple[int, bytes] | None:
        try:
            async with sessions.of(instance).post(
                instance.address(PATH), headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError):
            return None

    answers = [a for a in await asyncio.gather(*(ask(i) for i in instances if i.healthy)) if a is not None]
    if not answers:
        await send_error(send, 503, "no_instance", "no server could be reached")
        return
    status, text = next((a for a in answers if a[0] >= 400), (200, b""))
    await send_bytes(send, status, text, b"text/plain")
