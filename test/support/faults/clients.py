"""Two clients of the router, the openai package and bare HTTP; both fill in ``Seen``."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import openai

from benchmark.rig.servers import ServerError
from faults import wire
from faults.evidence import MARKER
from faults.oracle import Seen
from faults.prompts import CHAT, GENERATE, Prompt

HUNG_S = 75.0
"""Time after which a request without an end counts as hung, longer than the router's own limit."""

Read = Callable[[Any, Seen], None]
"""Parses a whole reply, or an event of a stream."""


async def exchange(port: int, raw: bytes, seen: Seen, read: Read | None = None, pause_s: float | None = None) -> Seen:
    """Send ``raw`` unchanged; read its reply into ``seen`` as it arrives. Without ``read`` any answer is accepted.

    ``pause_s``: after the first event the client does not read for this long (seconds), and receive buffers are small.
    """
    failed = ""
    try:
        async with wire.exchange(port, raw, slow=pause_s is not None) as reply:
            if reply.status >= 400:
                seen.reason, seen.status = wire.reason(await reply.body()), reply.status
                return seen
            if read and seen.stream != reply.events:
                raise wire.Broken(f"{'no' if seen.stream else 'a'} stream, though asked otherwise")
            seen.status = reply.status if reply.events else None
            async for said in reply.said():
                seen.status = reply.status
                if failed:
                    raise wire.Broken("an event after an error")
                if isinstance(said, dict) and (said.get("error") or said.get("object") == "error"):
                    seen.reason = failed = wire.told(said) or "an error"
                elif read:
                    read(said, seen)
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
                    seen.unread_s, pause_s = pause_s, None
            seen.done = (seen.done or not read) and reply.ended and not failed
    except (wire.Broken, OSError, ValueError, LookupError, TypeError) as e:
        seen.broken = f"{type(e).__name__}: {e}"[:200]
    return seen


class Bare:
    """HTTP client with one connection per request, for any route."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __call__(self, prompt: Prompt, seen: Seen, extra: Mapping[str, Any]) -> None:
        """Send the prompt with ``extra`` in its body; read the answer into ``seen`` as it arrives."""
        body = json.dumps({**prompt.body, "stream": seen.stream, **extra}).encode()
        raw = wire.request(prompt.route, body, {MARKER: str(seen.number)})
        await exchange(self._port, raw, seen, functools.partial(read, prompt.route))


class OpenAi:
    """The openai package, for completions and chats."""

    def __init__(self, port: int) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=HUNG_S + 5.0
        )

    async def __call__(self, prompt: Prompt, seen: Seen, extra: Mapping[str, Any]) -> None:
        """Send the prompt with ``extra`` in its body; read the answer into ``seen`` as it arrives."""
        known = {k: v for k, v in prompt.body.items() if k != "ignore_eos"}
        make: Any = self._client.chat.completions if prompt.route == CHAT else self._client.completions
        try:
            answer = await make.create(
                **known,
                stream=seen.stream,
                extra_headers={MARKER: str(seen.number)},
                extra_body={"ignore_eos": True, **extra},
            )
            seen.status = 200
            if not seen.stream:
                read(prompt.route, answer.model_dump(), seen)
                return
            async with answer:
                async for event in answer:
                    read(prompt.route, event.model_dump(), seen)
            seen.done = bool(seen.reason)
        except openai.APIStatusError as e:
            seen.status = e.status_code
            seen.reason = wire.reason(e.response.content)
        except openai.APIConnectionError as e:
            seen.broken = f"{type(e).__name__}: {e.__cause__!r}"[:200]
        except openai.APIError as e:
            # An error event within a stream.
            seen.reason, seen.done = str(e.message) or "an error", False
        except Exception as e:
            # The package does not wrap httpx's exceptions while a stream is read.
            seen.broken = f"{type(e).__name__}: {e}"[:200]

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()


def read(route: str, reply: Any, seen: Seen) -> None:
    """Read a whole reply, or one event of a stream, into ``seen``. An event of /generate holds all tokens so far, an
    event of another route only the new text."""
    seen.begun = True
    if route != GENERATE:
        for choice in reply["choices"]:
            said = choice.get("message") or choice.get("delta")
            seen.got = (seen.got or "") + ((said.get("content") if said else choice.get("text")) or "")
            seen.reason = choice["finish_reason"] or seen.reason
    elif isinstance(reply, list):
        seen.got = [r["output_ids"] for r in reply]
        seen.reason = " ".join(_ended(r) for r in reply) if all(map(_ended, reply)) else ""
    else:
        seen.got, seen.reason = list(reply["output_ids"]), _ended(reply)
    seen.done = bool(seen.reason)


def _ended(reply: Any) -> str:
    return str((reply["meta_info"]["finish_reason"] or {}).get("type", ""))


async def bounded(call: Awaitable[object], seen: Seen, leave_s: float | None = None, limit_s: float = HUNG_S) -> Seen:
    """Run one request until its end, until the client leaves (after ``leave_s`` seconds), or until the limit."""
    seen.begin = time.monotonic()
    try:
        async with asyncio.timeout(limit_s if leave_s is None else leave_s):
            await call
    except TimeoutError:
        seen.left, seen.hung = leave_s is not None, leave_s is None
    seen.end = time.monotonic()
    return seen


async def right_answers(port: int, prompts: Sequence[Prompt]) -> list[Any]:
    """Return the answers to all prompts without faults. Each prompt is sent twice: whole with two requests at
    a time, streamed with twelve. Raises ServerError if an answer is missing or the two answers differ."""
    first = await _all(port, prompts, stream=False, together=2)
    second = await _all(port, prompts[::-1], stream=True, together=12)
    for prompt, *both in zip(prompts, first, second[::-1], strict=True):
        for seen in both:
            if not seen.done or not seen.got:
                raise ServerError(
                    f"a prompt to {prompt.route} without faults: {seen.status} {seen.reason} {seen.broken}"
                )
        if both[0].got != both[1].got:
            raise ServerError(f"two answers of {prompt.route} without faults: {both[0].got!r}, {both[1].got!r}")
    return [seen.got for seen in first]


async def _all(port: int, prompts: Sequence[Prompt], stream: bool, together: int) -> list[Seen]:
    bare, room = Bare(port), asyncio.Semaphore(together)

    async def one(prompt: Prompt) -> Seen:
        seen = Seen(0, "baseline", stream=stream)
        async with room:
            return await bounded(bare(prompt, seen, {}), seen)

    return list(await asyncio.gather(*map(one, prompts)))
