"""One attempt: a request at one pair of servers, up to the reply's last byte at the client."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from ..pools.choice import Choice
from ..prompts.tokens import cached_tokens, reported_tokens
from ..router import Router
from ..servers.aborts import LiveRequest
from ..servers.instances import Instance, Lease
from ..servers.upstream import Lost, failure
from .call import Call
from .ids import IDS_MAX
from .replies import TRANSFER_FAILED, UNKNOWN, Client, Refused, Reply, content_type, fault
from .streams import Events, MergedEvents, merge_reply

DRAIN_S = 1.0
"""How long the prefill server's reply is waited for once the client has everything (seconds)."""
ABORTED_S = 5.0
"""How long the decode server's word is waited for on a request that a client had aborted (seconds)."""

Decoding = tuple[aiohttp.ClientResponse, bytes]
"""The decode server's answer: head and first bytes, or all of what is no stream."""

T = TypeVar("T")


@dataclass
class Attempt:
    """Built anew for each pair. Its two legs, the same request at a prefill and at a decode server, run side by side;
    whatever way ``run`` ends, both leases have ended and no leg is left running."""

    router: Router
    call: Call
    client: Client
    choice: Choice
    decoder: Instance
    left_s: float
    """Until it is given up (seconds)."""
    live: LiveRequest
    _prefill: asyncio.Task[Reply] = field(init=False)
    _decode: asyncio.Task[Decoding] = field(init=False)
    _raced: asyncio.Future[None] = field(init=False)
    """Done when the decode server has answered, or the prefill server has failed."""
    _response: aiohttp.ClientResponse | None = None
    """The decode server's, once it is passed on as a stream."""
    _expired: bool = False
    """It has been given up."""
    _asked_at: float | None = None
    """Since when the stream's next piece is waited for (monotonic seconds)."""
    _silence: asyncio.TimerHandle | None = None
    """Looks whether the stream stands still."""
    _hangs: Lost | None = None
    """The decode server, where it did."""
    _late: Refused | None = None
    """The prefill server's error, where the stream had begun already."""

    async def run(self) -> None:
        """Answer the client. Raises Refused, Lost or TimeoutError where the servers did not."""
        health, live = self.router.health, self.live
        prefiller, decoder = self.choice.instance, self.decoder
        began = time.monotonic()
        self.call.trail.try_at(prefiller, decoder, began)
        self.call.ids.renew()
        for_prefill, for_decode = self.call.wires(prefiller, self.choice.rank)
        share, load = self.choice.lease(), decoder.lease(self.call.kv_tokens)
        loop = asyncio.get_running_loop()
        self._raced = loop.create_future()
        prefill = self._prefill = share.leg = loop.create_task(self._run_prefill(for_prefill, share))
        decode = self._decode = load.leg = loop.create_task(self._run_decode(for_decode))
        expiry = loop.call_later(self.left_s, self._expire)
        prefill.add_done_callback(self._note_end)
        decode.add_done_callback(self._note_end)
        # The legs let go of them when they have their answers.
        del for_prefill, for_decode
        response: aiohttp.ClientResponse | None = None
        served = False
        known = self.call.ids.known_as()
        live.at = {at: ids[:IDS_MAX] for at, ids in zip((prefiller, decoder), known, strict=True)}
        try:
            with share, load:
                response, first = await self._race()
                share.end()
                if response.status >= 400:
                    health.answered(decoder, response.status)
                    raise Refused(decoder, Reply.of(response, first))
                await self._make_sure_it_came(first)
                self._note_ttft()
                now = time.monotonic()
                decoder.note_answer(now - (self.call.trail.prefilled or now))
                await self._answer(response, first)
                served = True
            health.answered(decoder, response.status)
            if not prefill.done():
                # Its connection can be used again only if its reply is read to the end.
                await asyncio.wait((prefill,), timeout=DRAIN_S)
        except TimeoutError:
            # The decode server had nothing to answer with before the prefill server was done.
            health.timed_out(decoder if _has_result(prefill) else prefiller, began)
            decoder.suspected.set()
            raise
        finally:
            expiry.cancel()
            if self._silence is not None:
                self._silence.cancel()
            if response is None and _has_result(decode):
                response = decode.result()[0]
            if response is not None:
                # Closes what has not been read to its end, keeps what has.
                response.close()
            if not served:
                # On a closed connection alone a server notices only after seconds. Where it has answered there is
                # nothing to drop: the id may be another's.
                if not prefill.done():
                    self._abort(prefiller)
                if not decode.done() or (self.call.stream and response is not None and response.status < 400):
                    self._abort(decoder)
            live.at = {}
            for leg in (prefill, decode):
                if leg.done():
                    _look_at(leg)
                else:
                    leg.cancel()
                    leg.add_done_callback(_look_at)

    def _expire(self) -> None:
        self._expired = True
        self._prefill.cancel()
        self._decode.cancel()
        if self._response is not None:
            self._response.close()
            if self.client.waited_for:
                # It would keep its place until it reads again, or is given up.
                self.client.hang_up()

    def _look(self) -> None:
        """Close a stream that stands still. A timer for each piece would cost more than the piece."""
        decoder, health = self.decoder, self.router.health
        silent_s = 0.0 if self._asked_at is None else time.monotonic() - self._asked_at
        if silent_s >= health.silence_s(decoder) and self._response is not None:
            self._hangs = Lost(decoder, "lost" if decoder.healthy else "cut", f"it sent nothing for {silent_s:.1f} s")
            self._response.close()
        else:
            self._silence = asyncio.get_running_loop().call_later(health.look_s, self._look)

    async def _post(self, instance: Instance, wire: bytes) -> aiohttp.ClientResponse:
        return await self.router.sessions.of(instance).post(
            instance.address(self.call.endpoint), data=wire, headers=self.call.headers
        )

    async def _run_prefill(self, wire: bytes, share: Lease) -> Reply:
        """The prefill leg, and what its reply teaches. Raises Lost."""
        call, instance = self.call, self.choice.instance
        try:
            async with await self._post(instance, wire) as response:
                reply = Reply.of(response, await response.read())
                share.end(reply.status < 400)
        except (aiohttp.ClientError, ConnectionError) as e:
            raise failure(instance, e) from e
        if reply.status < 400:
            # An error inside a reply that began as a success counts as the error it is.
            reply = fault(reply.body) or reply
        self.router.health.answered(instance, reply.status)
        if reply.status >= 400:
            return reply
        now = call.trail.prefilled = time.monotonic()
        instance.note_answer(now - (call.trail.sent or now))
        if not call.stream:
            self._note_ttft()
        tokens = reported_tokens(reply.body)
        if tokens is not None and not call.rooms and call.prompt is not None:
            self.router.counter.learn(call.prompt, tokens)
            cached = cached_tokens(reply.body)
            if cached is not None:
                self.choice.place.prefixes.correct(self.choice.cached, cached)
        call.prompt = None
        return reply

    async def _run_decode(self, wire: bytes) -> Decoding:
        """The decode leg, up to the first bytes of a stream, or to the end of a whole reply. Raises as the other."""
        instance = self.decoder
        try:
            response = await self._post(instance, wire)
            try:
                whole = not self.call.stream or response.status >= 400
                first = await (response.read() if whole else response.content.readany())
            except BaseException:
                response.close()
                raise
        except (aiohttp.ClientError, ConnectionError) as e:
            raise failure(instance, e) from e
        instance.heard()
        return response, first

    def _result(self, leg: asyncio.Task[T], instance: Instance) -> T:
        """Raises what the leg failed with; where this router has ended it, TimeoutError or Lost."""
        if leg.cancelled():
            if self._expired:
                raise TimeoutError
            raise Lost(instance, "cut", "it has become unhealthy")
        return leg.result()

    def _refusal(self) -> Refused | None:
        """The error that the prefill server has answered with. Raises what the leg failed with."""
        reply = self._result(self._prefill, self.choice.instance)
        return Refused(self.choice.instance, reply) if reply.status >= 400 else None

    def _note_end(self, leg: asyncio.Task[Any]) -> None:
        """That the prefill server is done decides nothing, and ``asyncio.wait`` would wake the request for it: this
        saves some ten microseconds."""
        fine = leg is self._prefill and _has_result(leg) and leg.result().status < 400
        if not fine and not self._raced.done():
            self._raced.set_result(None)

    async def _race(self) -> Decoding:
        """The decode server's answer, unless the prefill server fails first: then no answer would ever come."""
        decode = self._decode
        await self._raced
        if not decode.done():
            refused = self._refusal()
            # Of an abort both servers were told; what the client expects is the decode server's reply.
            await asyncio.wait((decode,), timeout=ABORTED_S if self.live.aborted else 0.0)
            if refused is not None and not decode.done():
                raise refused
        response, first = self._result(decode, self.decoder)
        if response.status >= 400 and _has_result(self._prefill):
            refused = self._refusal()
            if refused is not None:
                # The one follows from the other.
                raise refused
        return response, first

    async def _make_sure_it_came(self, first: bytes) -> None:
        """Raise Refused where a reply that began as a success says that the KV was not handed over.

        A stream says so in its first event, for its status line was sent before. Without a reason, where nobody has
        aborted the request, the reason is the prefill server's.
        """
        found = None if self.live.aborted else fault(first)
        if found is None:
            return
        if TRANSFER_FAILED in found.body:
            found.status = max(found.status, UNKNOWN)
            raise Refused(self.decoder, found)
        await asyncio.wait((self._prefill,), timeout=DRAIN_S)
        refused = self._refusal() if _has_result(self._prefill) else None
        if refused is not None and refused.unjoined:
            raise refused

    def _note_ttft(self) -> None:
        call = self.call
        if call.first_token_seen:
            return
        call.first_token_seen = True
        call.trail.first = time.monotonic()
        seconds = call.age_s
        self.router.journal.note_ttft(call.length_class, seconds)
        if call.slo_ms is not None:
            self.choice.instance.note_ttft(seconds, call.slo_ms / 1e3)

    async def _answer(self, response: aiohttp.ClientResponse, first: bytes) -> None:
        """Pass the decode server's reply to the client."""
        mine: bytes | None = None
        if self.call.logprobs:
            await asyncio.wait((self._prefill,))
            refused = self._refusal()
            if refused is not None:
                raise refused
            mine = self._prefill.result().body
        if self.call.stream:
            await self._pass_on(response, first, Events() if mine is None else MergedEvents(mine))
        else:
            await self.client.whole(Reply.of(response, first if mine is None else merge_reply(mine, first)))

    async def _pass_on(self, response: aiohttp.ClientResponse, first: bytes, events: Events) -> None:
        """The stream, event by event."""
        client = self.client
        client.started = True
        self._response = response
        self.call.forget()
        client.hold.end()

        def ended_late(_: asyncio.Task[Reply]) -> None:
            """An error of the prefill leg is the end of the stream."""
            self._late = self._refusal() if _has_result(self._prefill) else None
            if self._late is not None:
                response.close()

        if not self._prefill.done():
            self._prefill.add_done_callback(ended_late)
        await client.begin(response.status, content_type(response))
        chunk, part, content = first, b"", response.content
        self._look()
        try:
            while chunk:
                part = events.feed(chunk)
                if content.at_eof() and self._late is None:
                    # What came with the end is sent with it: 20 microseconds less than in two pieces.
                    break
                if part:
                    await client.go_on(part)
                # What has come meanwhile goes on in one piece: a write costs more than a turn of the loop.
                await asyncio.sleep(0)
                self._asked_at = time.monotonic()
                chunk, part = await content.readany(), b""
                self._asked_at = None
                self.decoder.heard()
        except (aiohttp.ClientError, ConnectionError) as e:
            if self._expired:
                raise TimeoutError from e
            raise self._late or self._hangs or failure(self.decoder, e) from e
        if self._late is not None:
            raise self._late
        await client.go_on(part + events.flush(), more=False)

    def _abort(self, instance: Instance) -> None:
        """Ask ``instance`` to drop the request, without waiting for it."""
        ids = self.live.at[instance]
        if instance.healthy and ids:
            key = self.call.headers.get("authorization")
            self.router.spawn(self.router.aborter.drop(instance, self.live, ids, key))


def _has_result(leg: asyncio.Task[Any]) -> bool:
    return leg.done() and not leg.cancelled() and leg.exception() is None


def _look_at(leg: asyncio.Task[Any]) -> None:
    """asyncio logs the exception of a failed task that nobody looked at; the other leg's failure was the answer."""
    if not leg.cancelled():
        leg.exception()
