"""Sibling processes behind one port: forwards requests to all of them, and merges their metrics."""

from __future__ import annotations

import asyncio
from hmac import compare_digest

import aiohttp
from starlette.requests import Request

from ..router import Router
from ..servers.upstream import Answer, forwarded

MARK = "x-laps-router-worker"
"""Header with the processes' secret: the request is from a sibling and for this process alone."""
LABEL = b"router_worker"
"""Label of every sample if there are several processes."""
ASK_S = 5.0
"""Time limit for the siblings' answers (seconds)."""
TOLD_S = 40.0
"""Time limit for forwarded aborts (seconds), longer than that for a server's answer."""
HUNG_S = 3.0
"""A process that does not answer its liveness check for this long has failed (seconds)."""


class Siblings:
    """Client for the other processes behind the port."""

    def __init__(self, router: Router) -> None:
        self._worker = router.worker

    def ask_me(self, request: Request) -> bool:
        """Return True if ``request`` comes from a sibling."""
        secret, given = self._worker.secret, request.headers.get(MARK, "")
        return bool(secret) and compare_digest(given.encode(), secret.encode())

    @property
    def others(self) -> list[int]:
        """Return the indices of the other processes."""
        return [i for i in range(len(self._worker.urls)) if i != self._worker.index]

    async def ask(self, request: Request, body: bytes = b"", timeout_s: float = ASK_S) -> dict[int, Answer | None]:
        """Forward ``request`` to all siblings, unless one has sent it. Returns their answers by index; None if one did
        not answer."""
        if not self.others or self.ask_me(request):
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
                # The sibling hangs, or is being restarted.
                return None

        # The certificate is for the name that clients use.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=False), timeout=aiohttp.ClientTimeout(timeout_s)
        ) as http:
            return dict(zip(self.others, await asyncio.gather(*(ask(http, i) for i in self.others)), strict=True))


def merged(texts: dict[int, bytes]) -> bytes:
    """Merge the metrics of all processes into one page, with a label of the process on each sample."""
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
