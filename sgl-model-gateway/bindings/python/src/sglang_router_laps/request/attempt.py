"""One attempt to serve a request at one pair of servers, until the client has the last byte of the reply."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from laps_core.pools.instances import Instance

from ..servers.aborts import LiveRequest
from ..servers.upstream import Lost, failure
from . import receipt as receipts
from .ids import IDS_MAX
from .legs import Decoding, Legs, has_result
from .replies import TRANSFER_FAILED, UNKNOWN, Client, Refused, Reply, content_type, fault, is_abort
from .streams import Events, MergedEvents, merge_reply

DRAIN_S = 1.0
"""Longest wait for the prefill server's reply once the decode server has answered (seconds)."""
ABORTED_S = 5.0
"""Longest wait for the decode server's reply to an aborted request (seconds)."""

T = TypeVar("T")


@dataclass
class Attempt(Legs):
    """One request at one pair of servers, with its two legs side by side. However ``run`` ends, both leases have ended
    and no leg still runs."""

    client: Client
    left_s: float
    """Time limit of the attempt (seconds), enforced here because an aiohttp timer for each leg would take 9
    microseconds."""
    live: LiveRequest
    _prefill: asyncio.Task[Reply] = field(init=False)
    _decode: asyncio.Task[Decoding] = field(init=False)
    _raced: asyncio.Future[None] = field(init=False)
    """Future that is done when the decode leg has ended, or the prefill leg has failed."""
    _response: aiohttp.ClientResponse | None = None
    """The decode server's response, once it is streamed to the client."""
    _expired: bool = False
    """True once the attempt has been given up."""
    _waiting_since: float | None = None
    """Start of the wait for the stream's next chunk (monotonic seconds); None while no chunk is awaited."""
    _silence: asyncio.TimerHandle | None = None
    """Timer that checks whether the stream stalls."""
    _stall: Lost | None = None
    """Failure of the attempt if the decode server's stream stalled."""
    _late: Refused | None = None
    """Prefill server's error, if the stream had already started."""

    async def run(self) -> None:
        """Have the servers answer the client. Raises Refused, Lost or TimeoutError if the servers fail."""
        health, live = self.router.health, self.live
        prefiller, decoder = self.choice.instance, self.decoder
        began = time.monotonic()
        self.call.trail.try_at(prefiller, decoder, began)
        self.call.ids.renew()
        for_prefill, for_decode = self.call.make_bodies(prefiller, self.choice.rank)
        self.router.pools.record_choice(self.call.ask, self.choice)
        share, load = self.choice.lease(), decoder.lease(self.call.kv_tokens)
        loop = asyncio.get_running_loop()
        self._raced = loop.create_future()
        prefill = self._prefill = share.leg = loop.create_task(self.run_prefill(for_prefill, share))
        decode = self._decode = load.leg = loop.create_task(self.run_decode(for_decode))
        expiry = loop.call_later(self.left_s, self._expire)
        prefill.add_done_callback(self._note_end)
        decode.add_done_callback(self._note_end)
        # Each leg drops its body when it has an answer: keep no reference here.
        del for_prefill, for_decode
        response: aiohttp.ClientResponse | None = None
        served = False
        known = self.call.ids.server_ids()
        live.at = {at: ids[:IDS_MAX] for at, ids in zip((prefiller, decoder), known, strict=True)}
        try:
            with share, load:
                response, first = await self._race()
                found = fault(first)
                share.end(response.status < 400 and found is None)
                if response.status >= 400:
                    reply = Reply.of(response, first)
                    health.record_reply(decoder, reply.status)
                    raise Refused(decoder, reply)
                await self._check_transfer(found)
                self.note_ttft()
                now = time.monotonic()
                decoder.note_answer(now - (self.call.trail.prefilled or now))
                if self.call.wants_receipt:
                    await self._add_receipt()
                await self._answer(response, first)
                served = True
            health.record_reply(decoder, response.status)
            if not prefill.done():
                # The connection can be reused only if the prefill server's reply is read to the end.
                await asyncio.wait((prefill,), timeout=DRAIN_S)
        except TimeoutError:
            # The decode server cannot answer first: blame the decode server only if the prefill server is done.
            health.record_timeout(decoder if has_result(prefill) else prefiller, began)
            health.suspect(decoder)
            raise
        finally:
            expiry.cancel()
            if self._silence is not None:
                self._silence.cancel()
            if response is None and has_result(decode):
                response = decode.result()[0]
            if response is not None:
                # Closes the connection if the response was not read to its end, and else releases it for reuse.
                response.close()
            if not served:
                # A server notices a closed connection only after seconds. A server that has answered has nothing to
                # abort, and another request may have the id by now.
                if not prefill.done():
                    self._abort(prefiller)
                if not decode.done() or (self.call.stream and response is not None and response.status < 400):
                    self._abort(decoder)
            live.at = {}
            prefill.cancel()
            decode.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._prefill.cancel()
        self._decode.cancel()
        if self._response is not None:
            self._response.close()
            if self.client.waited_for:
                # Otherwise a client that does not read would keep its slot until the parser's stall timer fires.
                self.client.hang_up()

    def _check_silence(self) -> None:
        """Close the stream if it stalls, else check again later: a timer per chunk would cost more than the chunk."""
        decoder, health = self.decoder, self.router.health
        # In a batch some prompts may still wait for their prefill, as long as those of other requests.
        waits = bool(self.call.batch_size) and decoder.healthy and not self._prefill.done()
        if (health.stood_still or waits) and self._waiting_since is not None:
            self._waiting_since = time.monotonic()
        silent_s = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        if silent_s >= health.silence_s(decoder) and self._response is not None:
            self._stall = Lost(decoder, "lost" if decoder.healthy else "cut", f"it sent nothing for {silent_s:.1f} s")
            self._response.close()
        else:
            self._silence = asyncio.get_running_loop().call_later(health.look_s, self._check_silence)

    def _result(self, leg: asyncio.Task[T], instance: Instance) -> T:
        """Return the result of ``leg``, or raise its failure: TimeoutError or Lost if this router cancelled ``leg``."""
        if leg.cancelled():
            if self._expired:
                raise TimeoutError
            raise Lost(instance, "cut", "the server became unhealthy")
        return leg.result()

    def _refusal(self) -> Refused | None:
        """Return the prefill server's error, if any. Raises the failure of the prefill leg."""
        reply = self._result(self._prefill, self.choice.instance)
        return Refused(self.choice.instance, reply) if reply.status >= 400 else None

    def _note_end(self, leg: asyncio.Task[Any]) -> None:
        """End the race unless ``leg`` is a successful prefill leg, which decides nothing. Unlike ``asyncio.wait``, this
        does not wake the request in that case, which saves about ten microseconds."""
        # ``has_result`` comes first: it also retrieves an exception, which asyncio would log otherwise.
        fine = has_result(leg) and leg is self._prefill and leg.result().status < 400
        if not fine and not self._raced.done():
            self._raced.set_result(None)

    async def _race(self) -> Decoding:
        """Return the decode server's answer, or raise the prefill server's failure: after that no answer would come."""
        decode = self._decode
        await self._raced
        if not decode.done():
            refused = self._refusal()
            # After an abort, prefer the decode server's reply, which the client expects.
            await asyncio.wait((decode,), timeout=ABORTED_S if self.live.aborted else 0.0)
            if refused is not None and not decode.done():
                raise refused
        response, first = self._result(decode, self.decoder)
        if response.status >= 400 and has_result(self._prefill) and (refused := self._refusal()) is not None:
            # The prefill server's error has caused the decode server's error.
            raise refused
        return response, first

    async def _check_transfer(self, found: Reply | None) -> None:
        """Raise Refused if the error ``found`` in a reply with status 200 says that the KV was not transferred.

        A stream reports this in its first event, after the status line. If the decode server's error does not
        name the transfer, the prefill server's error decides. An aborted request is not checked.
        """
        if found is None or self.live.aborted or is_abort(found.body):
            return
        if TRANSFER_FAILED in found.body:
            found.status = max(found.status, UNKNOWN)
            raise Refused(self.decoder, found)
        await asyncio.wait((self._prefill,), timeout=DRAIN_S)
        refused = self._refusal() if has_result(self._prefill) else None
        if refused is not None and refused.transfer_failed:
            raise refused

    async def _add_receipt(self) -> None:
        """Add the receipt to the reply's headers."""
        call = self.call
        await asyncio.wait((self._prefill,), timeout=DRAIN_S)
        if has_result(self._prefill) and call.receipt is not None:
            made = receipts.complete(call.receipt, call.trail)
            call.trail.receipt = call.ids.with_client_ids(made) if made else b""

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
            await self.client.send_reply(Reply.of(response, first if mine is None else merge_reply(mine, first)))

    async def _pass_on(self, response: aiohttp.ClientResponse, first: bytes, events: Events) -> None:
        """Stream the reply to the client, event by event."""
        client = self.client
        client.started = True
        self._response = response
        self.call.forget()
        client.hold.end()

        def ended_late(_: asyncio.Task[Reply]) -> None:
            """End the stream with the prefill leg's error, if any."""
            self._late = self._refusal() if has_result(self._prefill) else None
            if self._late is not None:
                response.close()

        if not self._prefill.done():
            self._prefill.add_done_callback(ended_late)
        await client.send_head(response.status, content_type(response))
        chunk, part, content = first, b"", response.content
        self._check_silence()
        try:
            while chunk:
                for event in events.parts(chunk):
                    if part:
                        await client.send_events(part)
                        await asyncio.sleep(0)
                    part = event
                if content.at_eof() and self._late is None:
                    # Send the last chunk together with the end of the stream, which saves 20 microseconds.
                    break
                if part:
                    await client.send_events(part)
                # Yield: chunks that arrive meanwhile are sent in one write, which costs more than a turn of the loop.
                await asyncio.sleep(0)
                self._waiting_since = time.monotonic()
                chunk, part = await content.readany(), b""
                self._waiting_since = None
                self.decoder.heard()
        except (aiohttp.ClientError, ConnectionError) as e:
            if self._expired:
                raise TimeoutError from e
            raise self._late or self._stall or failure(self.decoder, e) from e
        if self._late is not None:
            raise self._late
        await client.send_events(part + events.flush(), more=False)

    def _abort(self, instance: Instance) -> None:
        """Ask ``instance`` to abort the request, without waiting for the answer."""
        ids = self.live.at[instance]
        if instance.healthy and ids:
            key = self.call.headers.get("authorization")
            self.router.spawn(self.router.aborter.abort_at(instance, self.live, ids, key))
