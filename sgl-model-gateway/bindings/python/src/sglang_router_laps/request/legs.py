"""The two legs of a request: sending to each server of a pair, and learning from the server's reply."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
from laps_core.pools.choice import Choice
from laps_core.pools.instances import Instance, Lease
from laps_core.receipts.receipt import RECEIPT_HEADER

from ..prompts.tokens import CACHED, reported_tokens
from ..router import Router
from ..servers.upstream import Lost, address, failure
from .call import Call
from .replies import Reply, fault

Decoding = tuple[aiohttp.ClientResponse, bytes]
"""Decode server's answer: head and first bytes of a stream, or a whole reply."""


@dataclass
class Legs:
    """Sender of one request to a prefill and a decode server."""

    router: Router
    call: Call
    choice: Choice
    decoder: Instance

    async def _post(self, instance: Instance, body: bytes) -> aiohttp.ClientResponse:
        url = address(instance.url, self.call.endpoint)
        response = await self.router.sessions.of(instance).post(url, data=body, headers=self.call.headers)
        if response.method != "POST" or response.status // 100 not in (2, 4, 5):
            # A redirect has led to a page, or the client could not be told this status.
            response.close()
            raise Lost(instance, "lost", f"{response.method} {response.url} was answered {response.status}")
        return response

    async def run_prefill(self, body: bytes, share: Lease) -> Reply:
        """Run the prefill leg, learn from the reply, and return it. Raises Lost."""
        call, instance = self.call, self.choice.instance
        try:
            async with await self._post(instance, body) as response:
                reply = Reply.of(response, await response.read())
                call.receipt = response.headers.get(RECEIPT_HEADER)
        except (aiohttp.ClientError, ConnectionError) as e:
            raise failure(instance, e) from e
        if reply.status < 400:
            # An error inside a reply with status 200 counts as an error.
            reply = fault(reply.body) or reply
        share.end(reply.status < 400)
        self.router.health.record_reply(instance, reply.status)
        if reply.status >= 400:
            return reply
        now = call.trail.prefilled = time.monotonic()
        instance.note_answer(now - (call.trail.sent or now))
        if not call.stream:
            self.note_ttft()
        tokens = reported_tokens(reply.body)
        if tokens is not None and not call.batch_size and call.prompt is not None:
            self.router.counter.learn(call.prompt, tokens)
            cached = reported_tokens(reply.body, CACHED)
            if cached is not None:
                self.choice.place.prefixes.correct(self.choice.cached, cached)
        call.prompt = None
        return reply

    async def run_decode(self, body: bytes) -> Decoding:
        """Run the decode leg, up to the first bytes of a stream, or to the end of a whole reply. Raises Lost."""
        instance = self.decoder
        try:
            response = await self._post(instance, body)
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

    def note_ttft(self) -> None:
        """Record the time to first token, once."""
        call = self.call
        if call.first_token_seen:
            return
        call.first_token_seen = True
        call.trail.first = time.monotonic()
        seconds = call.age_s
        self.router.journal.note_ttft(call.length_class, seconds)
        if call.slo_ms is not None:
            self.choice.instance.note_ttft(seconds, call.slo_ms / 1e3)


def has_result(leg: asyncio.Task[Any]) -> bool:
    """Return True if ``leg`` has ended with a result."""
    return leg.done() and not leg.cancelled() and leg.exception() is None
