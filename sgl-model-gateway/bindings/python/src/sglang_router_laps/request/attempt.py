"""One attempt: a request at one pair of servers, up to the reply's last byte at the client."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import aiohttp

from ..pools.choice import Choice
from ..servers.instances import Instance, Lease
from ..servers.upstream import failure
from . import logprobs
from .aborts import Held
from .call import Call
from .client import Client
from .events import Events
from .faults import TRANSFER_FAILED, UNKNOWN, Refused, Reply, fault
from .legs import Decoding, Legs, content_type, for_client, has_result, look_at, raise_if_cut, refusal
from .replies import JSON
from .services import Services
from .tokens import reported_tokens

DRAIN_S = 1.0
"""How long the prefill server's reply is waited for once the client has everything (seconds)."""
ABORTED_S = 5.0
"""How long the decode server's word is waited for on a request that a client had aborted (seconds)."""


class Attempt:
    """Built anew for each pair. Whatever way ``run`` ends, both leases have ended and no leg is left running."""

    def __init__(
        self,
        services: Services,
        call: Call,
        client: Client,
        choice: Choice,
        decoder: Instance,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> None:
        self._services = services
        self._call = call
        self._client = client
        self._new_tokens = choice.new_tokens
        self._prefiller = choice.instance
        self._decoder = decoder
        self._legs = Legs(services.sessions, call, timeout)
        call.ids.renew()
        known = zip((self._prefiller, decoder), call.ids.known_as(), strict=True)
        self.held = Held(call.ids.rid, dict(known))
        """This attempt, as the servers know it."""
        self._late: Refused | None = None
        """The prefill server's error, where the stream had begun already."""

    async def run(self) -> None:
        """Answer the client. Raises Refused, Lost, Local or TimeoutError where the servers did not."""
        health, live = self._services.health, self._services.aborter.live
        prefiller, decoder = self._prefiller, self._decoder
        began = time.monotonic()
        for_prefill, for_decode = self._call.wires(prefiller)
        share, load = prefiller.lease(self._new_tokens), decoder.lease(self._new_tokens)
        loop = asyncio.get_running_loop()
        prefill = share.leg = loop.create_task(self._prefill(for_prefill, share))
        decode = load.leg = loop.create_task(self._legs.decode(decoder, for_decode))
        # The legs let go of them when they have their answers.
        del for_prefill, for_decode
        response: aiohttp.ClientResponse | None = None
        served = False
        live.add(self.held)
        try:
            with share, load:
                response, first = await self._race(prefill, decode)
                share.end()
                if response.status >= 400:
                    health.answered(decoder)
                    if response.status >= 500:
                        decoder.breaker.failed()
                    reply = Reply(response.status, content_type(response), first, for_client(response))
                    raise Refused(decoder, reply)
                if (never_came := await self._never_came(first, prefill)) is not None:
                    raise never_came
                self._note_ttft()
                await self._answer(response, first, prefill)
                served = True
            health.answered(decoder)
            decoder.breaker.succeeded()
            if not prefill.done():
                # Its connection can be used again only if its reply is read to the end.
                await asyncio.wait((prefill,), timeout=DRAIN_S)
        except TimeoutError:
            # The decode server had nothing to answer with before the prefill server was done.
            health.timed_out(decoder if has_result(prefill) else prefiller, began)
            health.suspect(decoder)
            raise
        finally:
            if response is None and has_result(decode):
                response = decode.result()[0]
            if response is not None:
                # Closes what has not been read to its end, keeps what has.
                response.close()
            live.remove(self.held)
            if not served:
                # On a closed connection alone a server notices only after seconds. Where it has answered there is
                # nothing to drop: the id may be another's.
                if not prefill.done():
                    self._abort(prefiller)
                if not decode.done() or (self._call.stream and response is not None and response.status < 400):
                    self._abort(decoder)
            for leg in (prefill, decode):
                leg.cancel()
                leg.add_done_callback(look_at)

    async def _prefill(self, wire: bytes, share: Lease) -> Reply:
        """The prefill leg, and what its reply teaches."""
        call, instance = self._call, self._prefiller
        reply = await self._legs.prefill(instance, wire, share)
        self._services.health.answered(instance)
        if reply.status < 400:
            instance.breaker.succeeded()
            if not call.stream:
                self._note_ttft()
            tokens = reported_tokens(reply.body)
            if tokens is not None and not call.batch and call.prompt is not None:
                self._services.counter.learn(call.prompt, tokens)
            call.prompt = None
        elif reply.status >= 500:
            instance.breaker.failed()
        return reply

    async def _race(self, prefill: asyncio.Task[Reply], decode: asyncio.Task[Decoding]) -> Decoding:
        """The decode server's answer, unless the prefill server fails first: then no answer would ever come."""
        await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            refused = refusal(prefill, self._prefiller)
            if refused is None:
                await asyncio.wait((decode,))
            elif self.held.asked:
                # Both servers were told; what the client expects is the decode server's reply.
                await asyncio.wait((decode,), timeout=ABORTED_S)
            if refused is not None and not decode.done():
                raise refused
        raise_if_cut(decode, self._decoder)
        response, first = decode.result()
        if response.status >= 400 and has_result(prefill):
            refused = refusal(prefill, self._prefiller)
            if refused is not None:
                # The one follows from the other.
                raise refused
        return response, first

    async def _never_came(self, first: bytes, prefill: asyncio.Task[Reply]) -> Refused | None:
        """The error of a reply that began as a success and says that the KV was not handed over.

        A stream says so in its first event, for its status line was sent before. Without a reason, where nobody has
        aborted the request, the reason is the prefill server's.
        """
        found = None if self.held.asked else fault(first)
        if found is None:
            return None
        if TRANSFER_FAILED in found.body:
            return Refused(self._decoder, Reply(max(found.status, UNKNOWN), JSON, found.body, []))
        if not prefill.done():
            await asyncio.wait((prefill,), timeout=DRAIN_S)
        refused = refusal(prefill, self._prefiller) if has_result(prefill) else None
        return refused if refused is not None and refused.unjoined else None

    def _note_ttft(self) -> None:
        call = self._call
        if call.first_token_seen:
            return
        call.first_token_seen = True
        seconds = call.age_s
        self._services.journal.note_ttft(call.length_class, seconds)
        if call.slo_ms is not None:
            self._prefiller.note_ttft(seconds, call.slo_ms / 1e3)

    async def _answer(self, response: aiohttp.ClientResponse, first: bytes, prefill: asyncio.Task[Reply]) -> None:
        """Pass the decode server's reply to the client."""
        mine = b""
        if self._call.logprobs:
            await asyncio.wait((prefill,))
            refused = refusal(prefill, self._prefiller)
            if refused is not None:
                raise refused
            mine = prefill.result().body
        if self._call.stream:
            passing = logprobs.StreamMerger(mine) if self._call.logprobs else Events()
            await self._pass_on(response, first, passing, prefill)
            return
        if self._call.logprobs:
            first = logprobs.merge_reply(mine, first)
        await self._client.whole(Reply(response.status, content_type(response), first, []))

    async def _pass_on(
        self,
        response: aiohttp.ClientResponse,
        first: bytes,
        passing: Events | logprobs.StreamMerger,
        prefill: asyncio.Task[Reply],
    ) -> None:
        """The stream, event by event."""
        client = self._client
        client.started = True
        self._call.forget()
        if not prefill.done():
            prefill.add_done_callback(partial(self._ended_late, response))
        await client.begin(response.status, content_type(response))
        chunk = first
        read = response.content.readany
        try:
            while chunk:
                part = passing.feed(chunk)
                if part:
                    await client.go_on(part)
                # What has come meanwhile goes on in one piece: a write costs more than a turn of the loop.
                await asyncio.sleep(0)
                chunk = await read()
                self._decoder.heard()
        except (aiohttp.ClientError, ConnectionError) as e:
            raise self._late or failure(self._decoder, e) from e
        if self._late is not None:
            raise self._late
        await client.end(passing.flush())

    def _ended_late(self, response: aiohttp.ClientResponse, prefill: asyncio.Task[Reply]) -> None:
        """The prefill leg has ended after the stream had begun: an error of it is the end of the stream."""
        if has_result(prefill):
            self._late = refusal(prefill, self._prefiller)
            if self._late is not None:
                response.close()

    def _abort(self, instance: Instance) -> None:
        """Ask ``instance`` to drop the request, without waiting for it."""
        ids = self.held.ids[instance]
        if instance.healthy and ids:
            key = self._call.headers.get("authorization")
            self._services.spawn(self._services.aborter.drop(instance, ids, key))
