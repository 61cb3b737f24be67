"""One request on its way through the router: to a prefill and a decode server, and back to the client."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import reprlib
import time
from functools import partial
from typing import Any

import aiohttp
import orjson
from laps_core.pools.pressure import Pool

from ..pools.ask import Ask
from ..pools.choice import Choice
from ..servers.instances import Instance, Lease, PrefillInstance
from ..servers.upstream import Local, Lost, failure, forwarded
from . import aborts, logprobs
from . import body as bodies
from .events import Events
from .faults import UNKNOWN, fault
from .measure import measure
from .prompt import Prompt, batch_size, read_prompt
from .replies import JSON, Scope, Send, error_body, send_bytes, send_error
from .services import Services
from .tokens import reported_tokens

logger = logging.getLogger(__name__)

DRAIN_S = 1.0
"""How long the prefill server's reply is waited for once the client has everything (seconds)."""
TRANSFER_FAILED = b"KVTransferError"
"""In SGLang's error where the KV could not be handed over: the decode server may be gone."""
NAME_MAX = 200
"""Longer ids are shortened in logs and messages (characters)."""
ABORTED_S = 5.0
"""How long the decode server's word is waited for on a request that a client had aborted (seconds)."""

NOTHING = Ask(0)
"""What a request asks whose prompt is not known yet, or of no more use."""


class Refused(Exception):
    """A server answered with an error."""

    def __init__(
        self, instance: Instance, status: int, content_type: bytes, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        super().__init__(f"{instance.role} {instance.url} answered {status}")
        self.instance = instance
        self.status, self.content_type, self.body = status, content_type, body
        self.headers = headers
        """What else of the server's headers is for the client."""

    @property
    def unjoined(self) -> bool:
        """Whether it was not this server that failed, but the way between the two."""
        return self.status >= 500 and TRANSFER_FAILED in self.body

    @property
    def elsewhere(self) -> bool:
        """Whether another server may answer better: this one is busy, or the pair of servers could not be joined."""
        return self.status == 503 or self.unjoined


Prefilled = tuple[int, bytes, bytes, list[tuple[bytes, bytes]]]
"""The prefill server's reply: status, content type, body, further headers."""
Decoding = tuple[aiohttp.ClientResponse, bytes]


class Passage:
    """A request whose body has been read. ``run`` answers it, whatever happens."""

    def __init__(self, lb: Services, endpoint: str, scope: Scope, send: Send, raw: bytes, body: dict[str, Any]) -> None:
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
        self.parts = aborts.parts(endpoint, body)
        self.rid: Any = body.get("rid")
        self.rid_given = self.rid is not None
        self.sent_rid: Any = self.rid
        """The id that this attempt has at the servers."""
        self.renamed: list[tuple[bytes, bytes]] = []
        """Ids of this attempt and the client's own, as they stand in replies."""
        self.slo_ms: float | None = None
        self.started = False
        """Something has been sent to the client."""
        self.first_token_seen = False
        self.finished = False
        """The last byte is on its way: the client may go."""
        self.length_class: Pool = "short"
        self.late: Refused | None = None
        """The prefill server's error, where the stream had begun already."""
        self.held: aborts.Held | None = None
        """This attempt, as the servers know it."""
        self.prompt: Prompt | None = None
        self.ask = NOTHING
        self.options: dict[str, Any] = {}
        """Of the client session, for this attempt."""

    @property
    def name(self) -> str:
        """The request's id for people, whatever the client sent as one."""
        return self.rid if isinstance(self.rid, str) and len(self.rid) <= NAME_MAX else reprlib.repr(self.rid)

    def id_in_use(self) -> bool:
        """Whether another request is under way by the id that the client chose."""
        named = self.lb.aborter.live.named
        chosen = [self.rid] if isinstance(self.rid, str) else []
        return any(named(i) for i in (*chosen, *aborts.ids(self.rid, self.parts)) if i)

    def take_deadline(self) -> None:
        """Move the deadline header into the body. Raises BadRequest."""
        texts = self.headers.popall(bodies.SLO_HEADER, [])
        if texts:
            self.slo_ms = bodies.read_deadline(texts)
            self.raw, self.body = bodies.add_deadline(self.endpoint, self.raw, self.body, self.slo_ms)

    async def run(self) -> None:
        """Try on a pair of servers, and on others as far as --retry-* allow while nothing has been sent."""
        lb, retries = self.lb, self.lb.retries
        prompt = self.prompt = read_prompt(self.endpoint, self.body)
        self.ask = measure(prompt, lb.counter, lb.image_tokens, len(self.raw))
        del prompt
        self._strip()
        lb.budget.earn()
        avoid: list[Instance] = []
        ended: Refused | Lost | Local | None = None
        deaths = 0
        for attempt in range(retries.attempts):
            pair = lb.pairs.choose(self.ask, avoid)
            if pair is None:
                break
            choice, decode = pair
            try:
                if attempt:
                    self.options = {"timeout": lb.sessions.timeout(time.monotonic() - self.arrived)}
                else:
                    lb.journal.note_choice(choice, self.ask.total)
                    self.length_class = choice.length_class
                await self._attempt(choice, decode)
                return
            except Lost as e:
                ended = e
                shared = not e.sent or e.instance.note_lost()
                lb.health.lost(e.instance, e.kind)
                again = True
                if e.sent:
                    # What kills servers kills the one it came to. Who was there alone when it died is not sent to the
                    # next; who was there with others is, once.
                    deaths += 1
                    again = deaths == 1 and (shared or e.kind == "cut" or not await lb.health.refuses(e.instance))
            except Local as e:
                ended = e
                e.instance.rest()
                again = not e.exhausted
            except Refused as e:
                ended = e
                if e.unjoined:
                    # Either of the two may be the one to leave.
                    avoid += [choice.instance, decode]
                there = lb.pairs.another(avoid) if e.unjoined else lb.pairs.elsewhere([*avoid, e.instance])
                again = e.elsewhere and there and lb.budget.spend()
            except TimeoutError:
                logger.warning("%s timed out after %.0f s", self.name, time.monotonic() - self.arrived)
                await self._fail(504, "timeout", f"request {self.name}: timed out")
                return
            avoid.append(ended.instance)
            asked = self.held is not None and self.held.asked
            again = again and not (self.started or asked) and attempt + 1 < retries.attempts
            if again or not isinstance(ended, Refused):
                logger.warning("%s %s%s", self.name, ended, "; trying another" if again else "")
            if not again:
                break
            lb.journal.counts.retried += 1
            await asyncio.sleep(retries.pause_s(attempt))
        await self._conclude(ended)

    def _strip(self) -> None:
        """Keep of the body what another attempt needs: its bytes, and the names of its members."""
        self.raw = bodies.without_routed(self.raw, self.body)
        self.body = {k: None for k in self.body if k not in bodies.ROUTED}

    async def _conclude(self, ended: Refused | Lost | Local | None) -> None:
        """Answer with how the last attempt ended; None: there was nowhere to go."""
        lb = self.lb
        if isinstance(ended, Refused):
            if self.started:
                await self._break_off(ended.body)
            elif ended.unjoined:
                # Nobody refused it, and the next pair of servers may serve it.
                lb.journal.counts.failed += 1
                told = _told(self._as_asked(ended.body))
                await send_error(self.send, 503, "transfer_failed", f"request {self.name}: {told}")
            else:
                self.finished = True
                await send_bytes(self.send, ended.status, self._as_asked(ended.body), ended.content_type, ended.headers)
        elif isinstance(ended, Lost):
            await self._fail(502, "upstream_lost", f"request {self.name}: {ended}")
        elif isinstance(ended, Local):
            lb.journal.counts.rejected += 1
            await send_error(self.send, 503, "no_connection", f"request {self.name}: {ended}")
        else:
            lb.journal.counts.rejected += 1
            await send_error(self.send, 503, "no_instance", f"no {lb.pairs.missing()} server is healthy")

    async def _fail(self, status: int, kind: str, message: str) -> None:
        self.lb.journal.counts.failed += 1
        if self.started:
            await self._break_off(error_body(status, kind, message))
        else:
            await send_error(self.send, status, kind, message)

    async def _break_off(self, error: bytes) -> None:
        # The status line is gone: a last event is what a stream's reader can still understand.
        event = b"data: " + error.replace(b"\n", b" ") + b"\n\n" if self.stream else b""
        await self.send({"type": "http.response.body", "body": event})

    async def _attempt(self, choice: Choice, decoder: Instance) -> None:
        """Run both legs. Whatever way this ends, both leases have ended and no leg is left running."""
        lb, prefiller = self.lb, choice.instance
        began = time.monotonic()
        wires = self._wires(prefiller)
        names = {i: aborts.ids(rid, self.parts) for i, (_, rid) in zip((prefiller, decoder), wires, strict=True)}
        held = self.held = aborts.Held(self.rid, names)
        share, load = prefiller.lease(choice.new_tokens), decoder.lease(choice.new_tokens)
        loop = asyncio.get_running_loop()
        prefill = share.leg = loop.create_task(self._prefill(prefiller, wires[0][0], share))
        decode = load.leg = loop.create_task(self._decode(decoder, wires[1][0]))
        # The legs let go of them when they have their answers.
        del wires
        response: aiohttp.ClientResponse | None = None
        served = False
        lb.aborter.live.add(held)
        try:
            with share, load:
                response, first = await self._race(prefill, prefiller, decode, decoder, held)
                share.end()
                if response.status >= 400:
                    lb.health.answered(decoder)
                    if response.status >= 500:
                        decoder.breaker.failed()
                    raise Refused(decoder, response.status, _content_type(response), first, _for_client(response))
                if (never_came := await self._never_came(first, prefill, prefiller, decoder, held)) is not None:
                    raise never_came
                self._note_ttft(prefiller)
                await self._answer(decoder, response, first, prefill, prefiller)
                served = True
            lb.health.answered(decoder)
            decoder.breaker.succeeded()
            if not prefill.done():
                # Its connection can be used again only if its reply is read to the end.
                await asyncio.wait((prefill,), timeout=DRAIN_S)
        except TimeoutError:
            # The decode server had nothing to answer with before the prefill server was done.
            lb.health.timed_out(decoder if _has_result(prefill) else prefiller, began)
            lb.health.suspect(decoder)
            raise
        finally:
            if response is None and _has_result(decode):
                response = decode.result()[0]
            if response is not None:
                # Closes what has not been read to its end, keeps what has.
                response.close()
            lb.aborter.live.remove(held)
            if not served:
                # On a closed connection alone a server notices only after seconds. Where it has answered there is
                # nothing to drop: the id may be another's.
                if not prefill.done():
                    self._abort(prefiller, held)
                if not decode.done() or (self.stream and response is not None and response.status < 400):
                    self._abort(decoder, held)
            for task in (prefill, decode):
                task.cancel()
                task.add_done_callback(_look_at)

    def _wires(self, prefiller: PrefillInstance) -> tuple[tuple[bytes, Any], tuple[bytes, Any]]:
        """(Body, id) of this attempt for the prefill and for the decode server: fresh rooms, and ids to abort by."""
        rooms = [random.getrandbits(62) for _ in range(self.batch)] if self.batch is not None else None
        extra: dict[str, Any] = {
            "bootstrap_host": prefiller.bootstrap_host if rooms is None else [prefiller.bootstrap_host] * len(rooms),
            "bootstrap_port": prefiller.bootstrap_port if rooms is None else [prefiller.bootstrap_port] * len(rooms),
            "bootstrap_room": random.getrandbits(62) if rooms is None else rooms,
        }
        if not self.rid_given:
            self.rid = self.sent_rid = os.urandom(16).hex()
        elif self.held is not None:
            # A server that has seen the id in another attempt refuses it until that is gone, and then aborts whatever
            # has it once more, seconds later.
            self.sent_rid, self.renamed = aborts.renamed(self.rid)
        theirs = aborts.at_prefill(self.sent_rid)
        try:
            at_prefill = bodies.splice(self.raw, self.body, {**extra, "rid": theirs})
        except TypeError:
            # An id that cannot be written goes as it came: the servers say what they make of it.
            theirs, at_prefill = self.sent_rid, bodies.splice(self.raw, self.body, extra)
        if isinstance(self.sent_rid, str) and (self.sent_rid != self.rid or not self.rid_given):
            extra["rid"] = self.sent_rid
        elif self.renamed:
            extra["rid"] = [r if isinstance(r, str) else None for r in self.sent_rid]
        return (at_prefill, theirs), (bodies.splice(self.raw, self.body, extra), self.sent_rid)

    async def _prefill(self, instance: PrefillInstance, wire: bytes, share: Lease) -> Prefilled:
        """The prefill leg. An error inside a reply that began as a success counts as the error it is."""
        try:
            async with self.lb.sessions.of(instance).post(
                instance.address(self.endpoint), data=wire, headers=self.headers, **self.options
            ) as response:
                reply = await response.read()
                share.end()
                status = response.status
                content_type = _content_type(response)
                headers = _for_client(response)
        except (aiohttp.ClientError, ConnectionError) as e:
            raise failure(instance, e) from e
        self.lb.health.answered(instance)
        found = fault(reply) if status < 400 else None
        if found is not None:
            (status, reply), content_type = found, JSON
        if status < 400:
            instance.breaker.succeeded()
            if not self.stream:
                self._note_ttft(instance)
            tokens = reported_tokens(reply)
            if tokens is not None and not self.batch and self.prompt is not None:
                self.lb.counter.learn(self.prompt, tokens)
            self.prompt = None
        else:
            # An error may name the request.
            reply = reply.replace(aborts.PREFILL.encode(), b"")
            if status >= 500:
                instance.breaker.failed()
        return status, content_type, reply, headers

    async def _decode(self, instance: Instance, wire: bytes) -> Decoding:
        """The decode leg up to the first bytes of a stream, or to the end of a whole reply."""
        try:
            response = await self.lb.sessions.of(instance).post(
                instance.address(self.endpoint), data=wire, headers=self.headers, **self.options
            )
            try:
                whole = not self.stream or response.status >= 400
                first = await (response.read() if whole else response.content.readany())
            except BaseException:
                response.close()
                raise
        except (aiohttp.ClientError, ConnectionError) as e:
            raise failure(instance, e) from e
        instance.heard()
        return response, first

    async def _race(
        self,
        prefill: asyncio.Task[Prefilled],
        prefiller: PrefillInstance,
        decode: asyncio.Task[Decoding],
        decoder: Instance,
        held: aborts.Held,
    ) -> Decoding:
        """The decode server's answer, unless the prefill server fails first: then no answer would ever come."""
        await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            refused = _refusal(prefill, prefiller)
            if refused is None:
                await asyncio.wait((decode,))
            elif held.asked:
                # Both servers were told; what the client expects is the decode server's reply.
                await asyncio.wait((decode,), timeout=ABORTED_S)
            if refused is not None and not decode.done():
                raise refused
        _raise_if_cut(decode, decoder)
        response, first = decode.result()
        if response.status >= 400 and _has_result(prefill):
            refused = _refusal(prefill, prefiller)
            if refused is not None:
                # The one follows from the other.
                raise refused
        return response, first

    async def _never_came(
        self,
        first: bytes,
        prefill: asyncio.Task[Prefilled],
        prefiller: PrefillInstance,
        decoder: Instance,
        held: aborts.Held,
    ) -> Refused | None:
        """The error of a reply that began as a success and says that the KV was not handed over.

        A stream says so in its first event, for its status line was sent before. Without a reason, where nobody has
        aborted the request, the reason is the prefill server's.
        """
        found = None if held.asked else fault(first)
        if found is None:
            return None
        status, error = found
        if TRANSFER_FAILED in error:
            return Refused(decoder, max(status, UNKNOWN), JSON, error, [])
        if not prefill.done():
            await asyncio.wait((prefill,), timeout=DRAIN_S)
        refused = _refusal(prefill, prefiller) if _has_result(prefill) else None
        return refused if refused is not None and refused.unjoined else None

    def _note_ttft(self, instance: PrefillInstance) -> None:
        if self.first_token_seen:
            return
        self.first_token_seen = True
        seconds = time.monotonic() - self.arrived
        self.lb.journal.note_ttft(self.length_class, seconds)
        if self.slo_ms is not None:
            instance.note_ttft(seconds, self.slo_ms / 1e3)

    async def _answer(
        self,
        decoder: Instance,
        response: aiohttp.ClientResponse,
        first: bytes,
        prefill: asyncio.Task[Prefilled],
        prefiller: PrefillInstance,
    ) -> None:
        """Pass the decode server's reply to the client."""
        content_type = _content_type(response)
        mine = b""
        if self.logprobs:
            await asyncio.wait((prefill,))
            refused = _refusal(prefill, prefiller)
            if refused is not None:
                raise refused
            mine = prefill.result()[2]
        if not self.stream:
            if self.logprobs:
                first = logprobs.merge_reply(mine, first)
            self.started = self.finished = True
            await send_bytes(self.send, response.status, self._as_asked(first), content_type)
            return
        passing = logprobs.StreamMerger(mine) if self.logprobs else Events()
        send = self.send
        self.started = True
        # No other attempt will need it, and a stream can be long.
        self.raw, self.prompt, self.ask = b"", None, NOTHING
        if not prefill.done():
            prefill.add_done_callback(partial(self._late, prefiller, response))
        await send(
            {"type": "http.response.start", "status": response.status, "headers": [(b"content-type", content_type)]}
        )
        chunk = first
        read = response.content.readany
        try:
            while chunk:
                part = passing.feed(chunk)
                if part:
                    part = self._as_asked(part) if self.renamed else part
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                # What has come meanwhile goes on in one piece: a write costs more than a turn of the loop.
                await asyncio.sleep(0)
                chunk = await read()
                decoder.heard()
        except (aiohttp.ClientError, ConnectionError) as e:
            raise self.late or failure(decoder, e) from e
        if self.late is not None:
            raise self.late
        self.finished = True
        await send({"type": "http.response.body", "body": self._as_asked(passing.flush())})

    def _as_asked(self, reply: bytes) -> bytes:
        """A reply with the client's own ids."""
        for ours, theirs in self.renamed:
            reply = reply.replace(ours, theirs)
        return reply

    def _late(
        self, prefiller: PrefillInstance, response: aiohttp.ClientResponse, prefill: asyncio.Task[Prefilled]
    ) -> None:
        """The prefill leg has ended after the stream had begun: an error of it is the end of the stream."""
        if _has_result(prefill):
            self.late = _refusal(prefill, prefiller)
            if self.late is not None:
                response.close()

    def _abort(self, instance: Instance, held: aborts.Held) -> None:
        """Ask ``instance`` to drop the request, without waiting for it."""
        if instance.healthy and held.ids[instance]:
            self.lb.spawn(self.lb.aborter.drop(instance, held.ids[instance], self.headers.get("authorization")))


def _told(body: bytes) -> str:
    """What an error says."""
    found = fault(body)
    error = orjson.loads(found[1])["error"] if found else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or body.decode(errors="replace"))


def _content_type(response: aiohttp.ClientResponse) -> bytes:
    return response.headers.get("content-type", "").encode("latin-1") or JSON


def _for_client(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """When to come back is the server's to say."""
    after = response.headers.get("retry-after")
    return [] if after is None else [(b"retry-after", after.encode("latin-1", "replace"))]


def _raise_if_cut(leg: asyncio.Task[Any], instance: Instance) -> None:
    if leg.cancelled():
        raise Lost(instance, "cut", "it has become unhealthy")


def _refusal(prefill: asyncio.Task[Prefilled], instance: PrefillInstance) -> Refused | None:
    """The error that the prefill server has answered with. Raises what the leg failed with."""
    _raise_if_cut(prefill, instance)
    status, content_type, reply, headers = prefill.result()
    return Refused(instance, status, content_type, reply, headers) if status >= 400 else None


def _has_result(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _look_at(task: asyncio.Task[Any]) -> None:
    """asyncio logs the exception of a failed task that nobody looked at; the other leg's failure was the answer."""
    if not task.cancelled():
        task.exception()
