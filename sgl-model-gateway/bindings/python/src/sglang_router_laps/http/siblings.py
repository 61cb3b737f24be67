"""The processes behind one port: what is told to one is told to all, and one says the numbers and the health of all."""

from __future__ import annotations

import asyncio
from hmac import compare_digest

import aiohttp
from starlette.requests import Request

from ..router import Router
from ..servers.upstream import Answer, forwarded

MARK = "x-laps-router-worker"
"""A header, with their secret: asked by a sibling, for this process alone."""
LABEL = b"router_worker"
"""Of every sample, where there are several processes."""
ASK_S = 5.0
"""How long the others' answers are waited for (seconds)."""
TOLD_S = 40.0
"""Longer than a server's answer is waited for (seconds)."""
HUNG_S = 3.0
"""A process that takes longer to say that it is alive is not (seconds)."""


class Siblings:
    """The other processes, as this one asks them."""

    def __init__(self, router: Router) -> None:
        self._worker = router.worker

    def ask_me(self, request: Request) -> bool:
        """Whether ``request`` is a sibling's."""
        secret, given = self._worker.secret, request.headers.get(MARK, "")
        return bool(secret) and compare_digest(given.encode(), secret.encode())

    @property
    def others(self) -> list[int]:
        """Their numbers."""
        return [i for i in range(len(self._worker.urls)) if i != self._worker.index]

    async def ask(self, request: Request, body: bytes = b"", timeout_s: float = ASK_S) -> dict[int, Answer | None]:
        """The same of all others: their answers by number; None where one gave none."""
        if not self.others:
            return {}
        headers = forwarded(request.scope["headers"])
        headers[MARK] = self._worker.secret
        path = f"{request.url.path}?{request.url.query}"

        async def ask(http: aiohttp.ClientSession, i: int) -> Answer | None:
            try:
                async with http.request(
                    request.method, self._worker.urls[i] + path, data=body, headers=headers
                ) as reply:
                    return reply.status, await reply.read()
            except (aiohttp.ClientError, OSError):
                # It hangs, or is being started again.
                return None

        # Its certificate is for the name that clients know.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=False), timeout=aiohttp.ClientTimeout(timeout_s)
        ) as http:
            return dict(zip(self.others, await asyncio.gather(*(ask(http, i) for i in self.others)), strict=True))


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
