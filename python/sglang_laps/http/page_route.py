"""``GET /laps``: a page that shows what this server does. The page itself reads the other routes of the server."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.datastructures import Headers
from fastapi.responses import HTMLResponse
from laps_core.protocol import STATUS_ROUTE
from laps_core.receipts.receipt import RECEIPTS_ROUTE, TRACE_ROUTE

from sglang_laps.http.routes import serve

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
"""Types of the ASGI specification."""

ROUTE = "laps"
READ = frozenset((ROUTE, STATUS_ROUTE, RECEIPTS_ROUTE, TRACE_ROUTE))
"""The route of the page, and the routes that the page reads."""
PAGE = Path(__file__).parent / "page" / "index.html"
ASK = 'Basic realm="SGLang"'
"""Header that makes a browser ask for a password, and send the password with the page's own requests, too."""


def add(app: FastAPI) -> None:
    """Serve the page from SGLang's application. A browser asks for the page's key, which is the key of the status."""
    html = PAGE.read_text()
    headers = {"content-security-policy": policy(html), "x-content-type-options": "nosniff"}

    @serve(app, ROUTE, include_in_schema=False)
    async def laps_page() -> Response:
        return HTMLResponse(html, headers=headers)

    # SGLang adds its key check later, and middleware added later runs first: this wrapper must stand before all.
    build = app.build_middleware_stack
    setattr(app, "build_middleware_stack", lambda: Passwords(build()))  # noqa: B010


def policy(html: str) -> str:
    """Return a content security policy that allows the page's own script, and requests to its own server."""
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digests = " ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Passwords:
    """Turns a browser's password into SGLang's key, for the page and the routes that the page reads."""

    def __init__(self, app: ASGIApp) -> None:
        """`app`: the application that answers the requests."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").rpartition("/")[2]
        if scope["type"] != "http" or scope["method"] != "GET" or path not in READ:
            await self._app(scope, receive, send)
            return

        async def ask(message: Message) -> None:
            if path == ROUTE and message["type"] == "http.response.start" and message["status"] == 401:
                message["headers"] = [*message.get("headers", ()), (b"www-authenticate", ASK.encode())]
            await send(message)

        await self._app(_with_key(scope, page=path == ROUTE), receive, ask)


def _with_key(scope: Scope, *, page: bool) -> Scope:
    """Return ``scope`` with the password of HTTP's basic scheme as a bearer token. `page`: True for the page itself,
    which other sites may link to."""
    headers = Headers(raw=scope["headers"])
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # A browser also sends the password with requests of other sites; SGLang would let such a site read the answer.
    foreign = "origin" in headers or (not page and headers.get("sec-fetch-site") in ("cross-site", "same-site"))
    if scheme.lower() != "basic" or foreign:
        return scope
    try:
        key = b64decode(given).decode().partition(":")[2]
    except ValueError:
        return scope
    if not key.isascii():  # SGLang's check of keys would raise
        return scope
    rest = [(name, value) for name, value in scope["headers"] if name.lower() != b"authorization"]
    return {**scope, "headers": [*rest, (b"authorization", f"Bearer {key}".encode())]}
