"""One request on its way through the router: to a prefill and a decode server, and back to the client."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from typing import TYPE_CHECKING, Any

import aiohttp
from sglang_laps.policy.pressure import Pool

from . import body as bodies
from . import logprobs
from .ask import measure
from .instances import Instance, Lease, PrefillInstance
from .pools import Choice
from .prompt import batch_size, read_prompt
from .replies import JSON, Scope, Send, error_body, send_bytes, send_error
from .tokens import reported_tokens
from .upstream import Lost, forwarded

if TYPE_CHECKING:
    from .balancer import LapsMiniLoadBalancer

logger = logging.getLogger(__name__)

TRIES = 2
DRAIN_S = 1.0
"""How long the prefill server's reply is waited for once the client has everything (seconds)."""
FORGET_S = 0.2
"""Pause before a second try under an id that the client chose (seconds)."""
ABORTS_MAX = 256
"""Prompts of one batch that are aborted one by one; closing the connection aborts the rest."""


class Refused(Exception):
    """A prefill server answered with an error, which is then the answer."""

    def __init__(self, status: int, content_type: bytes, body: bytes) -> None:
        super().__init__(status)
        self.status, self.content_type, self.body = status, content_type, body


class Passage:
    """A request whose body has been read. ``run`` answers it, whatever happens."""

    def __init__(
        self, lb: LapsMiniLoadBalancer, endpoint: str, scope: Scope, send: Send, raw: bytes, body: dict[str, Any]
    ) -> None:
        self.lb = lb
        self.endpoint = endpoint
        self.send = send
        self.raw = raw
        self.body = body
        self.arrived = time.monotonic()
        self.headers = forwarded(scope["headers"])
        self.stream = bool(body.get("stream", False))
        self.logprobs = logprobs.wanted(body)
        self.batch = batch_size(endpoint, body)
        self.rid: Any = body.get("rid")
        self.slo_ms: float | None = None
        self.started = False
        """Something has been sent to the client."""
        self.first_token_seen = False
        self.finished = False
        """The last byte is on its way: the client may go."""
        self.length_class: Pool = "short"

    def take_deadline(self) -> None:
        """Move the deadline header into the body. Raises BadRequest."""
        texts = self.headers.popall(bodies.SLO_HEADER, [])
        if texts:
            self.slo_ms = bodies.read_deadline(texts)
            self.raw, self.body = bodies.add_deadline(self.endpoint, self.raw, self.body, self.slo_ms)

    async def run(self) -> None:
        """Try on one pair of servers, and once more on another if a connection fails before anything is sent."""
        lb = self.lb
        self.prompt = read_prompt(self.endpoint, self.body)
        ask = measure(self.prompt, lb.counter, lb.config.image_tokens, len(self.raw))
        avoid: list[Instance] = []
        lost: Lost | None = None
        for attempt in range(TRIES):
            choice = lb.pools.choose(ask, [i for i in avoid if isinstance(i, PrefillInstance)])
            decode = lb.choose_decode(avoid)
            if choice is None or decode is None:
                break
            if not attempt:
                lb.note_choice(choice, ask.total)
                self.length_class = choice.length_class
            try:
                await self._attempt(choice, decode)
                return
            except Lost as e:
                lost = e
                avoid.append(e.instance)
                lb.health.lost(e.instance, refused=e.refused)
                again = not self.started and attempt + 1 < TRIES
                logger.warning("%s %s%s", self.rid, e, "; trying another" if again else "")
                if not again:
                    break
                lb.counts.retried += 1
                if self.body.get("rid") is not None:
                    # A decode server refuses the client's id while it still has the aborted try under it.
                    await asyncio.sleep(FORGET_S)
            except Refused as e:
                await send_bytes(self.send, e.status, e.body, e.content_type)
                return
            except TimeoutError:
                lost = None
                logger.warning("%s timed out after %.0f s", self.rid, time.monotonic() - self.arrived)
                await self._fail(504, "timeout", f"request {self.rid}: timed out")
                return
        if lost is not None:
            await self._fail(502, "upstream_lost", f"request {self.rid}: {lost}")
        else:
            lb.counts.rejected += 1
            missing = "decode" if lb.any_prefill() else "prefill"
            await send_error(self.send, 503, "no_instance", f"no {missing} server is healthy")

    async def _fail(self, status: int, kind: str, message: str) -> None:
        self.lb.counts.failed += 1
        if not self.started:
            await send_error(self.send, status, kind, message)
            return
        # The status line is gone: a last event is what a stream's reader can still understand.
        event = b"data: " + error_body(status, kind, message) + b"\n\n" if self.stream else b""
        await self.send({"type": "http.response.body", "body": event})

    async def _attempt(self, choice: Choice, decoder: Instance) -> None:
        """Run both legs. Whatever way this ends, both leases have ended and no leg is left running."""
        prefiller = choice.instance
        wire = self._wire(prefiller)
        loop = asyncio.get_running_loop()
        prefill = loop.create_task(self._prefill(prefiller, wire, share := prefiller.lease(choice.new_tokens)))
        decode = loop.create_task(self._decode(decoder, wire))
        response: aiohttp.ClientResponse | None = None
        served = False
        try:
            with share, decoder.lease(choice.new_tokens):
                response, first = await self._race(prefill, decode)
                share.end()
                if response.status < 400:
                    self._note_ttft(prefiller)
                await self._answer(decoder, response, first, prefill)
                served = response.status < 400
            self.lb.health.answered(decoder)
            if served and not prefill.done():
                # Its connection can be used again only if its reply is read to the end.
                await asyncio.wait((prefill,), timeout=DRAIN_S)
        finally:
            if response is None and _has_result(decode):
                response = decode.result()[0]
            if response is not None:
                # Closes what has not been read to its end, keeps what has.
                response.close()
            for task in (prefill, decode):
                task.cancel()
                task.add_done_callback(_look_at)
            if not served:
                self._abort(prefiller, decoder)

    def _wire(self, prefiller: PrefillInstance) -> bytes:
        """The body for this attempt: fresh rooms, and an id to abort by unless the client chose one."""
        rooms = [random.getrandbits(62) for _ in range(self.batch)] if self.batch is not None else None
        extra: dict[str, Any] = {
            "bootstrap_host": prefiller.bootstrap_host if rooms is None else [prefiller.bootstrap_host] * len(rooms),
            "bootstrap_port": prefiller.bootstrap_port if rooms is None else [prefiller.bootstrap_port] * len(rooms),
            "bootstrap_room": random.getrandbits(62) if rooms is None else rooms,
        }
        if self.body.get("rid") is None:
            self.rid = extra["rid"] = os.urandom(16).hex()
        return bodies.splice(self.raw, self.body, extra)

    async def _prefill(self, instance: PrefillInstance, wire: bytes, share: Lease) -> tuple[int, bytes, bytes]:
        """The prefill leg: (status, content type, body)."""
        try:
            async with self.lb.sessions.of(instance).post(
                instance.address(self.endpoint), data=wire, headers=self.headers
            ) as response:
                reply = await response.read()
                share.end()
                status = response.status
                content_type = response.headers.get("content-type", "").encode("latin-1") or JSON
        except (aiohttp.ClientError, ConnectionError) as e:
            raise Lost(instance, e) from e
        self.lb.health.answered(instance)
        if status < 400:
            if not self.stream:
                self._note_ttft(instance)
            tokens = reported_tokens(reply)
            if tokens is not None and not self.batch:
                self.lb.counter.learn(self.prompt, tokens)
        return status, content_type, reply

    async def _decode(self, instance: Instance, wire: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        """The decode leg up to the first bytes of a stream, or to the end of a whole reply."""
        try:
            response = await self.lb.sessions.of(instance).post(
                instance.address(self.endpoint), data=wire, headers=self.headers
            )
            try:
                whole = not self.stream or response.status >= 400
                first = await (response.read() if whole else response.content.readany())
            except BaseException:
                response.close()
                raise
        except (aiohttp.ClientError, ConnectionError) as e:
            raise Lost(instance, e) from e
        return response, first

    async def _race(
        self,
        prefill: asyncio.Task[tuple[int, bytes, bytes]],
        decode: asyncio.Task[tuple[aiohttp.ClientResponse, bytes]],
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """The decode server's answer, unless the prefill server fails first: then no answer would ever come."""
        await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            status, content_type, reply = prefill.result()
            if status >= 400:
                raise Refused(status, content_type, reply)
            await asyncio.wait((decode,))
        return decode.result()

    def _note_ttft(self, instance: PrefillInstance) -> None:
        if self.first_token_seen:
            return
        self.first_token_seen = True
        seconds = time.monotonic() - self.arrived
        self.lb.note_ttft(self.length_class, seconds)
        if self.slo_ms is not None:
            instance.note_ttft(seconds, self.slo_ms / 1e3)

    async def _answer(
        self,
        decoder: Instance,
        response: aiohttp.ClientResponse,
        first: bytes,
        prefill: asyncio.Task[tuple[int, bytes, bytes]],
    ) -> None:
        """Pass the decode server's reply to the client."""
        content_type = response.headers.get("content-type", "").encode("latin-1") or JSON
        if not self.stream or response.status >= 400:
            if self.logprobs and response.status < 400:
                first = logprobs.merge_reply((await prefill)[2], first)
            self.started = self.finished = True
            await send_bytes(self.send, response.status, first, content_type)
            return
        merger = logprobs.StreamMerger((await prefill)[2]) if self.logprobs else None
        send = self.send
        self.started = True
        await send(
            {"type": "http.response.start", "status": response.status, "headers": [(b"content-type", content_type)]}
        )
        chunk = first
        read = response.content.readany
        try:
            while chunk:
                part = merger.feed(chunk) if merger else chunk
                await send({"type": "http.response.body", "body": part, "more_body": True})
                # What has come meanwhile goes on in one piece: a write costs more than a turn of the loop.
                await asyncio.sleep(0)
                chunk = await read()
        except (aiohttp.ClientError, ConnectionError) as e:
            raise Lost(decoder, e) from e
        self.finished = True
        await send({"type": "http.response.body", "body": merger.flush() if merger else b""})

    def _abort(self, *instances: Instance) -> None:
        """Ask the servers to drop the request: on a closed connection alone they notice only after seconds."""
        if self.batch is not None and isinstance(self.rid, str):
            rids = [f"{self.rid}_{i}" for i in range(min(self.batch, ABORTS_MAX))]
        else:
            rids = self.rid[:ABORTS_MAX] if isinstance(self.rid, list) else [self.rid]
        for instance in instances:
            if instance.healthy:
                self.lb.abort(instance, rids, self.headers.get("authorization"))


def _has_result(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _look_at(task: asyncio.Task[Any]) -> None:
    """asyncio logs the exception of a failed task that nobody looked at; the other leg's failure was the answer."""
    if not task.cancelled():
        task.exception()
