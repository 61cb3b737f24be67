"""The ASGI application: our routes in front, the stock MiniLB's behind."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

import orjson
from laps_core.protocol import STATUS_ROUTE

from ..request.aborts import PATH as ABORT
from ..request.body import BadRequest, parse, refuse_empty, refuse_samples
from ..request.call import Call
from ..request.client import Client
from ..request.passage import Passage
from ..request.prompt import READERS
from ..request.replies import Receive, Scope, Send, send_bytes, send_error
from ..router import Router
from ..telemetry.status import PAGE, status
from . import flush
from .request_body import ClientGone, TooLarge, read_body, replay

logger = logging.getLogger(__name__)

NO_OBJECT = b'{"detail":"the body is no JSON object"}'
"""In the shape of the stock router's answer, which cannot always be written: it repeats the body."""

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class LapsApp:
    """One callable: what it does not serve itself goes to ``stock`` untouched."""

    def __init__(self, router: Router, stock: Asgi) -> None:
        self._router = router
        self._stock = stock
        self._get = {f"/{STATUS_ROUTE}": self._status, "/metrics": self._metrics, "/laps": self._page}
        self._post = {f"/{endpoint}": endpoint for endpoint in READERS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] == "http":
            path, method = scope["path"], scope["method"]
            if method == "POST":
                endpoint = self._post.get(path)
                if endpoint is not None:
                    await self._generate(endpoint, scope, receive, send)
                    return
                if path == f"/{ABORT}":
                    await self._abort(scope, receive, send)
                    return
                if path == "/flush_cache":
                    self._router.pools.forget_prefixes()
                    await flush.serve(self._router.sessions, self._router.instances, scope, send)
                    return
            elif method == "GET":
                answer = self._get.get(path)
                if answer is not None:
                    await answer(scope, send)
                    return
        await self._stock(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._router.open()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._router.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _generate(self, endpoint: str, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        if await self._full(send):
            return
        raw = await self._body(scope, receive, send)
        # Only now: a client that does not send its body holds no place.
        if raw is None or await self._full(send):
            return
        router.places.taken += 1
        try:
            call = await self._call(endpoint, scope, receive, send, raw)
            # The call lets go of the body when it is of no more use.
            del raw
            if call is not None:
                await self._carry(call, receive, send)
        finally:
            router.places.taken -= 1

    async def _full(self, send: Send) -> bool:
        """Whether too many requests are in flight; if so, this one is answered."""
        router = self._router
        if not router.places.full:
            return False
        router.counts.rejected += 1
        await send_error(send, 503, "overloaded", f"{router.places.most} requests are in flight already")
        return True

    async def _call(self, endpoint: str, scope: Scope, receive: Receive, send: Send, raw: bytes) -> Call | None:
        """What is asked; None where it has been answered already."""
        router = self._router
        parsed = parse(raw)
        if parsed is None:
            router.counts.refused += 1
            await self._stock(scope, replay(raw, receive), send)
            return None
        raw, body = parsed
        if not isinstance(body, dict):
            router.counts.refused += 1
            await send_bytes(send, 422, NO_OBJECT)
            return None
        call = Call(endpoint, scope, raw, body)
        try:
            refuse_empty(endpoint, body)
            refuse_samples(endpoint, body)
            if any(map(router.services.aborter.live.named, call.ids.chosen())):
                # The servers would refuse it too, and one that has refused it ends the first one's stream.
                raise BadRequest(f"rid: a request with the id {call.ids.name} is under way")
            call.take_deadline()
        except BadRequest as e:
            router.counts.refused += 1
            await send_error(send, 400, "invalid_request_error", str(e))
            return None
        return call

    async def _carry(self, call: Call, receive: Receive, send: Send) -> None:
        """Have it served; a client that goes away cancels it, and both its legs with it."""
        client = Client(send, call.stream, call.ids)
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            if not client.finished:
                gone = True
                task.cancel()

        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            await Passage(self._router.services, call, client).run()
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            self._router.counts.disconnected += 1
            logger.info("%s client disconnected", call.ids.name)
        finally:
            watcher.cancel()

    async def _abort(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"]).get(b"authorization")
        raw = await self._body(scope, receive, send)
        if raw is not None:
            await self._router.services.aborter.serve(raw, key.decode("latin-1") if key else None, send)

    async def _body(self, scope: Scope, receive: Receive, send: Send) -> bytes | None:
        """The whole request body; None where it did not come and that has been said."""
        router = self._router
        try:
            return await read_body(scope, receive, router.max_payload, router.timeout)
        except ClientGone:
            router.counts.disconnected += 1
        except TooLarge:
            router.counts.refused += 1
            await send_error(send, 413, "payload_too_large", f"the body is larger than {router.max_payload} bytes")
        except TimeoutError:
            router.counts.refused += 1
            await send_error(send, 408, "request_timeout", "the body did not arrive in time", close=True)
        return None

    async def _status(self, scope: Scope, send: Send) -> None:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        last = query.get("last", [""])[0]
        history = 0
        if query.get("history") == ["1"]:
            history = int(last) if last.isdecimal() else sys.maxsize
        await send_bytes(send, 200, orjson.dumps(status(self._router.view, history=history)))

    async def _metrics(self, scope: Scope, send: Send) -> None:
        text, content_type = self._router.metrics.text()
        await send_bytes(send, 200, text, content_type)

    async def _page(self, scope: Scope, send: Send) -> None:
        page = PAGE.read_bytes()
        await send_bytes(send, 200, page, b"text/html; charset=utf-8")
