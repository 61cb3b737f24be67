"""Routes that do not generate: status, metrics and health for operators, aborts and cache flushes for clients."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from laps_core.protocol import STATUS_ROUTE
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.routing import Router as Routes
from starlette.types import ASGIApp, Receive, Scope, Send

from ..request.body import read_body, require_json
from ..request.ids import fresh, ids_elsewhere
from ..request.replies import JSON, BadRequest, refusal
from ..router import Router
from ..servers.aborts import ABORT
from ..servers.upstream import Answer
from .keys import keyed
from .status import Metrics, status
from .workers import Workers

PAGE = Path(__file__).parent / "page" / "index.html"
"""Page that shows the status live."""
ASKED = ("v1/models", "model_info", "get_model_info")
"""Paths that this router forwards to a prefill server, because MiniLB would send no certificate and no key."""
QUERY_S = 3.0
"""Time limit for a server's answer to such a query (seconds): the next server may be well."""
FLUSH = "flush_cache"
FLUSH_S = 30.0
"""Time limit for a server's answer (seconds)."""
UNREACHED = refusal(503, "no_instance", "no server could be reached")


class Rest:
    """Endpoints of the router; other paths go to the stock application."""

    def __init__(self, router: Router, stock: ASGIApp, closed: Callable[[], None]) -> None:
        """Call ``closed`` when the router has closed."""
        self._router = router
        self._closed = closed
        self._metrics = Metrics(router)
        routes = [
            Route(f"/{STATUS_ROUTE}", keyed(self.status, router.args)),
            Route("/laps", keyed(self.page, router.args)),
            Route("/metrics", self.metrics),
            Route("/liveness", self.liveness),
            Route("/readiness", self.readiness),
            *(Route(f"/{path}", self.forward_query) for path in ASKED),
            Route(f"/{ABORT}", self.abort, methods=["POST"]),
            Route(f"/{FLUSH}", self.flush, methods=["POST"]),
            *Workers(router).routes,
        ]
        self._stock = stock
        self._routes = Routes(routes, redirect_slashes=False, default=self._others, lifespan=self._lifespan)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request to these routes or to the stock routes. Raises HTTPException."""
        if scope["type"] == "http":
            # With "app" set, starlette's routes raise errors instead of answering in starlette's format.
            scope["app"] = self
        await self._routes(scope, receive, send)

    async def _others(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the stock routes. Raises HTTPException if none has this path (404) or method (405)."""
        if scope["type"] == "http":
            found = self._match(scope)
            # The stock application redirects paths with one trailing slash too many or too few.
            path = scope["path"]
            other = path.rstrip("/") if path.endswith("/") else f"{path}/"
            if not found and not (other and self._match({**scope, "path": other})):
                raise HTTPException(404)
            if found == Match.PARTIAL.value:
                raise HTTPException(405)
        await self._stock(scope, receive, send)

    def _match(self, scope: Scope) -> int:
        """Return the best match of the stock routes, as the value of a starlette Match; 0 if none matches."""
        return max((r.matches(scope)[0].value for r in getattr(self._stock, "routes", ())), default=0)

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        await self._router.open()
        yield
        await self._router.close()
        self._closed()

    async def status(self, request: Request) -> Response:
        """Return the status. ``?history=1`` adds all samples; ``&last=N`` limits the samples to the last N."""
        history, last = 0, request.query_params.get("last", "")
        if request.query_params.get("history") == "1":
            # A number of ten or more digits exceeds any count of samples, so it means all samples.
            history = int(last) if last.isdecimal() and len(last) < 10 else sys.maxsize
        return Response(orjson.dumps(status(self._router, history=history)), media_type=JSON.decode())

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def page(self, _: Request) -> Response:
        return HTMLResponse(PAGE.read_bytes())

    async def liveness(self, _: Request) -> Response:
        """Return 200: the event loop runs."""
        return PlainTextResponse("alive")

    async def readiness(self, _: Request) -> Response:
        """Return 200 if the router should get requests."""
        return PlainTextResponse("ready") if self._router.ready() else PlainTextResponse("not ready", 503)

    async def forward_query(self, request: Request) -> ASGIApp:
        """Forward a query about the model to a prefill server, with the client's key."""
        router, path, key = self._router, request.url.path[1:], request.headers.get("authorization")
        for i in sorted(router.pools.instances, key=lambda i: not i.healthy):
            try:
                status, body = await router.sessions.request(i, path, QUERY_S, key)
            except (aiohttp.ClientError, OSError):
                continue
            return Response(body, status, media_type=JSON.decode())
        return UNREACHED

    async def flush(self, request: Request) -> ASGIApp:
        """Flush the cache of every healthy server with the client's key. Forget the prefixes if a prefill server has
        agreed. An unreachable server is ignored, because its cache is lost. Raises Rejection."""
        if "origin" in request.headers:
            # Browsers let a page of another site send a request without a body, or with a body not declared as JSON.
            require_json(request.scope)
        router, key = self._router, request.headers.get("authorization")
        up = [i for i in router.instances if i.healthy]
        answers = await asyncio.gather(*(router.sessions.post(i, FLUSH, key, FLUSH_S) for i in up))
        if any(i.role == "prefill" and a and a[0] < 400 for i, a in zip(up, answers, strict=True)):
            router.pools.forget_prefixes()
        reached = [a for a in answers if a is not None]
        bad = (a for a in reached if a[0] >= 400)
        return _reply(next(bad, (200, b"")) if reached else None, "text/plain")

    async def abort(self, request: Request) -> ASGIApp:
        """Forward a client's abort, with the client's key, to every server that has the request. Without permission,
        return a server's refusal instead. Raises ClientDisconnect and Rejection."""
        aborter = self._router.aborter
        raw = await read_body(request.scope, request.receive, self._router.args)
        require_json(request.scope)
        try:
            body = orjson.loads(raw)
            rid, everything = body.get("rid") or "", body.get("abort_all", False)
            if not isinstance(rid, str) or not isinstance(everything, bool):
                raise ValueError
        except (ValueError, AttributeError):
            raise BadRequest('/abort_request takes {"rid": "..."} or {"abort_all": true}') from None
        if not (rid or everything):
            # SGLang answers 200 here, too.
            return _reply((200, b""))
        rid, key = "" if everything else rid, request.headers.get("authorization")
        allowed = await aborter.check_permission(key, fresh())
        if allowed is None or allowed[0] >= 400:
            return _reply(allowed)
        # An id that is not known here may belong to another router.
        return _reply(await aborter.forward(rid, ids_elsewhere(rid, key) if rid else {}, key))


def _reply(answer: Answer | None, media_type: str = JSON.decode()) -> ASGIApp:
    """Return ``answer`` as the router's reply; a 503 if ``answer`` is None."""
    if answer is None:
        return UNREACHED
    return Response(answer[1], answer[0], media_type=media_type if answer[1] else "text/plain")
