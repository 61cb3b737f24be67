"""The ASGI application: our routes in front, the stock MiniLB's behind."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ..prompts.reading import READERS
from ..request.body import parse, read_body, refuse
from ..request.call import Call
from ..request.passage import Passage, Retries
from ..request.replies import BadRequest, Client, Rejection, refusal
from ..router import Router
from .routes import Rest

logger = logging.getLogger(__name__)


class LapsApp:
    """One callable: what it does not serve itself goes to ``stock`` untouched."""

    def __init__(self, router: Router, stock: ASGIApp) -> None:
        self._router = router
        self._retries = Retries(router.args)
        self._generating = {f"/{endpoint}": endpoint for endpoint in READERS}
        self._rest = Rest(router, stock).app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not starlette's: its patterns, request and response objects take 8 microseconds more for each request.
        posted = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._generating.get(scope["path"]) if posted else None
        try:
            if endpoint is None:
                await self._rest(scope, receive, send)
            else:
                await self._generate(endpoint, scope, receive, send)
        except ClientDisconnect:
            self._router.counts.disconnected += 1
        except Rejection as e:
            if e.reply.status == 503:
                self._router.counts.rejected += 1
            else:
                self._router.counts.refused += 1
            await e.reply(scope, receive, send)

    async def _generate(self, endpoint: str, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        self._make_sure_of_room()
        raw = await read_body(scope, receive, router.args)
        # Only now: a client that does not send its body holds no place.
        self._make_sure_of_room()
        router.in_flight += 1
        try:
            call = self._call(endpoint, scope, raw)
            # The call lets go of the body when it is of no more use.
            del raw
            await self._carry(call, receive, send)
        finally:
            router.in_flight -= 1

    def _make_sure_of_room(self) -> None:
        most = self._router.max_in_flight
        if self._router.in_flight >= most:
            raise Rejection(refusal(503, "overloaded", f"{most} requests are in flight already"))

    def _call(self, endpoint: str, scope: Scope, raw: bytes) -> Call:
        """What is asked. Raises Rejection."""
        raw, body = parse(raw)
        refuse(endpoint, body)
        call = Call(endpoint, scope, raw, body)
        if any(map(self._router.aborter.named, call.ids.chosen())):
            # The servers would refuse it too, and one that has refused it ends the first one's stream.
            raise BadRequest(f"rid: a request with the id {call.ids.name} is under way")
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
            await Passage(self._router, self._retries, call, client).run()
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            self._router.counts.disconnected += 1
            logger.info("%s client disconnected", call.ids.name)
        finally:
            watcher.cancel()
