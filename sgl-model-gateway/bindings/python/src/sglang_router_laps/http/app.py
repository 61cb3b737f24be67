"""ASGI application: our routes first, then the routes of the stock MiniLB."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import reprlib
from collections.abc import Awaitable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..memory import HOLD, Hold
from ..prompts.reading import READERS
from ..queue import TurnedAway
from ..request.body import parse, read_body, refuse, require_json
from ..request.call import Call
from ..request.passage import Passage, Retries
from ..request.replies import INVALID, BadRequest, Client, Rejection, Reply, refusal
from ..request.trail import GONE, ID_HEADERS, AccessLog, Trail, request_id
from ..router import Router
from ..tracing import Tracer
from .parser import HANG_UP
from .routes import Rest

logger = logging.getLogger(__name__)

STOPPED = "stopping", "the router is being stopped"
"""Type and message of the error of a request that was still in flight when the router had to stop."""
STOP_S = 0.5
"""Longest wait for a client that does not read this error (seconds)."""
LINGER_S = 2.0
"""Time for which the rest of a refused body is read and dropped, so that the client gets the reply (seconds)."""


class LapsApp:
    """Server of the generating routes. ``Rest`` serves all other routes, including those of ``stock``."""

    def __init__(self, router: Router, stock: ASGIApp, tracer: Tracer | None = None) -> None:
        self._router = router
        self._tracer = tracer
        self._retries = Retries(router.args)
        self._generating = {f"/{endpoint}": endpoint for endpoint in READERS}
        names = ID_HEADERS if router.args.request_id_headers is None else router.args.request_id_headers
        self._id_headers = {name.lower().encode("latin-1", "replace"): turn for turn, name in enumerate(names)}
        self._log = AccessLog()
        self._rest = Rest(router, stock, self._closed).app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # starlette's routing is not used: its patterns, request and response objects cost 8 microseconds per request.
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        endpoint = self._generating.get(scope["path"]) if scope["method"] == "POST" else None
        trail = Trail(request_id(scope["headers"], self._id_headers), endpoint or "")
        hold = Hold(self._router.bodies, unread=endpoint is not None)
        scope[HOLD] = hold
        try:
            if endpoint is None:
                await self._rest(scope, receive, _marked(send, trail))
            else:
                await self._generate(trail, scope, receive, send)
        except ClientDisconnect:
            trail.status = GONE
            self._router.counts.disconnected += 1
        except TurnedAway as e:
            self._router.counts.rejected += 1
            await self._answer(trail, refusal(e.status, e.kind, str(e), e.after_s), scope, receive, send)
        except Rejection as e:
            self._router.counts.refused += 1
            await self._answer(trail, e.reply, scope, receive, send)
        except HTTPException as e:
            self._router.counts.refused += 1
            reply = refusal(e.status_code, INVALID, f"{scope['method']} {scope['path']}: {e.detail}")
            reply.headers = [(k.lower().encode(), v.encode()) for k, v in (e.headers or {}).items()]
            await self._answer(trail, reply, scope, receive, send)
        except asyncio.CancelledError:
            if not self._has_to_stop():
                raise
            hold.unread = False
            await self._answer(trail, refusal(503, *STOPPED), scope, receive, send)
        except Exception:
            self._router.counts.failed += 1
            logger.exception("request %s failed", trail.id)
            message = f"request {trail.id}: the router failed; see its log"
            try:
                await self._answer(trail, refusal(500, "internal_error", message), scope, receive, send)
            except RuntimeError:
                # The answer has started. Breaking it off shows the client that the answer is incomplete.
                raise ConnectionAbortedError(message) from None
        finally:
            hold.end()
            if endpoint is not None:
                self._ended(trail)

    @staticmethod
    async def _answer(trail: Trail, reply: Reply, scope: Scope, receive: Receive, send: Send) -> None:
        trail.status = reply.status
        send = _marked(send, trail)
        if not scope[HOLD].unread:
            await reply(scope, receive, send)
            return
        await reply.close(send)
        # Closing a connection with unread input would discard the answer.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})

    async def _generate(self, trail: Trail, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        router.queue.check_admission()
        # A client that does not send its body must not take a slot.
        raw = await read_body(scope, receive, router.args)
        require_json(scope)
        call = self._call(trail, scope, raw)
        # The call drops the body when it is no longer needed: keep no reference here.
        del raw
        if self._tracer is not None:
            self._tracer.start(trail, call.headers)
        await self._carry(call, scope, receive, send)

    def _call(self, trail: Trail, scope: Scope, raw: bytes) -> Call:
        """Return the parsed request. Raises Rejection."""
        raw, body = parse(raw)
        refuse(trail.endpoint, body)
        call = Call(trail, scope, raw, body)
        twin = next(filter(self._router.aborter.find, call.ids.client_ids()), None)
        if twin is not None:
            # An abort by a repeated id would be ambiguous. Servers refuse a repeated id, too.
            raise BadRequest(f"rid: a request with the id {reprlib.repr(twin)} is under way")
        return call

    async def _carry(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the servers answer the request. If the client disconnects, cancel the request and both of its legs."""
        client = Client(send, call.stream, call.ids, call.trail, scope[HOLD], scope["extensions"][HANG_UP])
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
            if gone:
                task.uncancel()
                call.trail.status = GONE
                self._router.counts.disconnected += 1
                logger.info("%s client disconnected", call.ids.name)
            elif client.started and self._has_to_stop():
                if not client.finished:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(STOP_S):
                            await client.refuse(503, *STOPPED)
            else:
                raise
        finally:
            call.trail.rid = call.ids.name
            watcher.cancel()

    def _has_to_stop(self) -> bool:
        """Return True if this request was cancelled because the router stops. Then keep on, to answer it."""
        task = asyncio.current_task()
        if task is None or not self._router.draining:
            return False
        task.uncancel()
        self._router.counts.rejected += 1
        return True

    def _ended(self, trail: Trail) -> None:
        self._log.note(trail)
        if self._tracer is not None:
            self._tracer.end(trail)

    def _closed(self) -> None:
        self._log.write()
        if self._tracer is not None:
            self._tracer.close()


def _marked(send: Send, trail: Trail) -> Send:
    """Wrap ``send`` so that the head of the answer carries the trail's headers."""

    def marked(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *trail.headers]
        return send(message)

    return marked
