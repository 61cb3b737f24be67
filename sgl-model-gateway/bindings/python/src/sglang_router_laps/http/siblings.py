"""One of several processes behind a port: what is told to one is told to all, and one says the numbers of all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..request.body import read_body
from ..router import Router
from ..servers.upstream import Answer, forwarded

MARK = "x-laps-router-worker"
"""A header: asked by a sibling, for this process alone."""
LABEL = b"router_worker"
"""Of every sample, where there are several processes."""
METRICS = "/metrics"
METRICS_S = 5.0
"""A sibling that takes longer is left out (seconds)."""
TOLD = ("/abort_request", "/flush_cache")
"""What all must know."""
TOLD_S = 40.0
"""Longer than a server's answer is waited for (seconds)."""


class Siblings:
    """In front of the routes that do not generate."""

    def __init__(self, app: ASGIApp, router: Router) -> None:
        self._app = app
        self._router = router
        self._me, self._all = router.worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on where it is for this process alone. Raises ClientDisconnect, and Rejection."""
        if scope["type"] == "http" and len(self._all) > 1 and not any(n == MARK.encode() for n, _ in scope["headers"]):
            if scope["path"] == METRICS:
                answers = await self._ask(range(len(self._all)), scope, b"", METRICS_S)
                texts = {i: text for i, (status, text) in answers.items() if status == 200}
                await Response(merged(texts), media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
                return
            if scope["path"] in TOLD:
                await self._tell(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        """All others first: whoever has the request that an abort is about knows it before its servers do."""
        body = await read_body(scope, receive, self._router.args)
        await self._ask([i for i in range(len(self._all)) if i != self._me], scope, body, TOLD_S)

        async def again() -> dict[str, object]:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    async def _ask(self, whom: Sequence[int], scope: Scope, body: bytes, timeout_s: float) -> dict[int, Answer]:
        """The answers of those that gave one."""
        headers = forwarded(scope["headers"])
        headers[MARK] = str(self._me)
        url = Request(scope).url
        path = f"{url.path}?{url.query}"
        found: dict[int, Answer] = {}

        async def ask(http: aiohttp.ClientSession, i: int) -> None:
            try:
                async with http.request(scope["method"], self._all[i] + path, data=body, headers=headers) as reply:
                    found[i] = reply.status, await reply.read()
            except (aiohttp.ClientError, OSError):
                # It is being started again.
                pass

        # Its certificate is for the name that clients know.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=False), timeout=aiohttp.ClientTimeout(timeout_s)
        ) as http:
            await asyncio.gather(*(ask(http, i) for i in whom))
        return found


def merged(texts: dict[int, bytes]) -> bytes:
    """The metrics of all processes as one page: each sample says which it is of."""
    families: dict[bytes, list[bytes]] = {}
    for i, text in texts.items():
        head = b""
        for line in text.splitlines():
            if line.startswith(b"#"):
                # HELP comes before TYPE, and both before the samples.
                head = line if line.startswith(b"# HELP") else head
                lines = families.setdefault(head, [])
                if line not in lines:
                    lines.append(line)
            else:
                name, brace, rest = line.partition(b"{")
                if not brace:
                    name, _, rest = line.partition(b" ")
                    rest = b"} " + rest
                families.setdefault(head, []).append(b'%s{%s="%d"%s%s' % (name, LABEL, i, b"," if brace else b"", rest))
    return b"".join(line + b"\n" for lines in families.values() for line in lines)
