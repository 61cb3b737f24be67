"""The two legs of an attempt: the same request at a prefill and at a decode server."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from ..servers.instances import Instance, Lease, PrefillInstance
from ..servers.upstream import Lost, Sessions, failure
from .call import Call
from .faults import Headers, Refused, Reply, fault
from .ids import AT_PREFILL
from .replies import JSON

Decoding = tuple[aiohttp.ClientResponse, bytes]
"""The decode server's answer: head and first bytes, or all of what is no stream."""


class Legs:
    """Sends one attempt. Both raise Lost or Local where a connection fails, and TimeoutError."""

    def __init__(self, sessions: Sessions, call: Call, timeout: aiohttp.ClientTimeout | None) -> None:
        """``timeout``: None for the session's own."""
        self._sessions = sessions
        self._call = call
        self._options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}

    async def _post(self, instance: Instance, wire: bytes) -> aiohttp.ClientResponse:
        return await self._sessions.of(instance).post(
            instance.address(self._call.endpoint), data=wire, headers=self._call.headers, **self._options
        )

    async def prefill(self, instance: PrefillInstance, wire: bytes, share: Lease) -> Reply:
        """The whole reply. An error inside one that began as a success counts as the error it is."""
        try:
            async with await self._post(instance, wire) as response:
                body = await response.read()
                share.end()
                reply = Reply(response.status, content_type(response), body, for_client(response))
        except (aiohttp.ClientError, ConnectionError) as e:
            raise failure(instance, e) from e
        found = fault(body) if reply.status < 400 else None
        if found is not None:
            reply = reply._replace(status=found.status, body=found.body, content_type=JSON)
        if reply.status < 400:
            return reply
        # An error may name the request.
        return reply._replace(body=reply.body.replace(AT_PREFILL.encode(), b""))

    async def decode(self, instance: Instance, wire: bytes) -> Decoding:
        """Up to the first bytes of a stream, or to the end of a whole reply."""
        try:
            response = await self._post(instance, wire)
            try:
                whole = not self._call.stream or response.status >= 400
                first = await (response.read() if whole else response.content.readany())
            except BaseException:
                response.close()
                raise
        except (aiohttp.ClientError, ConnectionError) as e:
            raise failure(instance, e) from e
        instance.heard()
        return response, first


def content_type(response: aiohttp.ClientResponse) -> bytes:
    """Of a server's reply."""
    return response.headers.get("content-type", "").encode("latin-1") or JSON


def for_client(response: aiohttp.ClientResponse) -> Headers:
    """When to come back is the server's to say."""
    after = response.headers.get("retry-after")
    return [] if after is None else [(b"retry-after", after.encode("latin-1", "replace"))]


def raise_if_cut(leg: asyncio.Task[Any], instance: Instance) -> None:
    """Raise Lost where this router has ended the leg."""
    if leg.cancelled():
        raise Lost(instance, "cut", "it has become unhealthy")


def refusal(prefill: asyncio.Task[Reply], instance: PrefillInstance) -> Refused | None:
    """The error that the prefill server has answered with. Raises what the leg failed with."""
    raise_if_cut(prefill, instance)
    reply = prefill.result()
    return Refused(instance, reply) if reply.status >= 400 else None


def has_result(leg: asyncio.Task[Any]) -> bool:
    """Whether it has ended well."""
    return leg.done() and not leg.cancelled() and leg.exception() is None


def look_at(leg: asyncio.Task[Any]) -> None:
    """asyncio logs the exception of a failed task that nobody looked at; the other leg's failure was the answer."""
    if not leg.cancelled():
        leg.exception()
