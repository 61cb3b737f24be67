"""Two clients of the router, the openai package and bare HTTP; both fill in ``RequestRecord``."""

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
from faults.oracle import RequestRecord
from faults.prompts import CHAT, GENERATE, Prompt

HUNG_S = 75.0
"""Time after which a request without an end counts as hung, longer than the router's own limit."""

Read = Callable[[Any, RequestRecord], None]
"""Parses a whole reply, or an event of a stream."""


async def exchange(
    port: int, raw: bytes, record: RequestRecord, read: Read | None = None, pause_s: float | None = None
) -> RequestRecord:
    """Send ``raw`` unchanged; read its reply into ``record`` as it arrives. Without ``read`` any answer is accepted.

    ``pause_s``: after the first event the client does not read for this long (seconds), and receive buffers are small.
    """
    failed = ""
    try:
        async with wire.exchange(port, raw, slow=pause_s is not None) as reply:
            if reply.status >= 400:
                record.reason, record.status = wire.reason(await reply.body()), reply.status
                return record
            if read and record.stream != reply.events:
                raise wire.BrokenReply(f"{'no' if record.stream else 'a'} stream, though asked otherwise")
            record.status = reply.status if reply.events else None
            async for event in reply.values():
                record.status = reply.status
                if failed:
                    raise wire.BrokenReply("an event after an error")
                if isinstance(event, dict) and (event.get("error") or event.get("object") == "error"):
                    record.reason = failed = wire.error_message(event) or "an error"
                elif read:
                    read(event, record)
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
                    record.unread_s, pause_s = pause_s, None
            record.done = (record.done or not read) and reply.ended and not failed
    except (wire.BrokenReply, OSError, ValueError, LookupError, TypeError) as e:
        record.broken = f"{type(e).__name__}: {e}"[:200]
    return record


class BareClient:
    """HTTP client with one connection per request, for any route."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __call__(self, prompt: Prompt, record: RequestRecord, extra: Mapping[str, Any]) -> None:
        """Send the prompt with ``extra`` in its body; read the answer into ``record`` as it arrives."""
        body = json.dumps({**prompt.body, "stream": record.stream, **extra}).encode()
        raw = wire.request(prompt.route, body, {MARKER: str(record.number)})
        await exchange(self._port, raw, record, functools.partial(read_answer, prompt.route))


class OpenAiClient:
    """The openai package, for completions and chats."""

    def __init__(self, port: int) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=HUNG_S + 5.0
        )

    async def __call__(self, prompt: Prompt, record: RequestRecord, extra: Mapping[str, Any]) -> None:
        """Send the prompt with ``extra`` in its body; read the answer into ``record`` as it arrives."""
        known = {k: v for k, v in prompt.body.items() if k != "ignore_eos"}
        make: Any = self._client.chat.completions if prompt.route == CHAT else self._client.completions
        try:
            answer = await make.create(
                **known,
                stream=record.stream,
                extra_headers={MARKER: str(record.number)},
                extra_body={"ignore_eos": True, **extra},
            )
            record.status = 200
            if not record.stream:
                read_answer(prompt.route, answer.model_dump(), record)
                return
            async with answer:
                async for event in answer:
                    read_answer(prompt.route, event.model_dump(), record)
            record.done = bool(record.reason)
        except openai.APIStatusError as e:
            record.status = e.status_code
            record.reason = wire.reason(e.response.content)
        except openai.APIConnectionError as e:
            record.broken = f"{type(e).__name__}: {e.__cause__!r}"[:200]
        except openai.APIError as e:
            # An error event within a stream.
            record.reason, record.done = str(e.message) or "an error", False
        except Exception as e:
            # The package does not wrap httpx's exceptions while a stream is read.
            record.broken = f"{type(e).__name__}: {e}"[:200]

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()


def read_answer(route: str, reply: Any, record: RequestRecord) -> None:
    """Read a whole reply, or one event of a stream, into ``record``. An event of /generate holds all tokens so far, an
    event of another route only the new text."""
    record.begun = True
    if route != GENERATE:
        for choice in reply["choices"]:
            message = choice.get("message") or choice.get("delta")
            record.answer = (record.answer or "") + ((message.get("content") if message else choice.get("text")) or "")
            record.reason = choice["finish_reason"] or record.reason
    elif isinstance(reply, list):
        record.answer = [r["output_ids"] for r in reply]
        record.reason = " ".join(_finish_reason(r) for r in reply) if all(map(_finish_reason, reply)) else ""
    else:
        record.answer, record.reason = list(reply["output_ids"]), _finish_reason(reply)
    record.done = bool(record.reason)


def _finish_reason(reply: Any) -> str:
    return str((reply["meta_info"]["finish_reason"] or {}).get("type", ""))


async def run_with_limit(
    call: Awaitable[object], record: RequestRecord, leave_s: float | None = None, limit_s: float = HUNG_S
) -> RequestRecord:
    """Run one request until its end, until the client leaves (after ``leave_s`` seconds), or until the limit."""
    record.begin = time.monotonic()
    try:
        async with asyncio.timeout(limit_s if leave_s is None else leave_s):
            await call
    except TimeoutError:
        record.left, record.hung = leave_s is not None, leave_s is None
    record.end = time.monotonic()
    return record


async def collect_right_answers(port: int, prompts: Sequence[Prompt]) -> list[Any]:
    """Return the answers to all prompts without faults. Each prompt is sent twice: whole with two requests at
    a time, streamed with twelve. Raises ServerError if an answer is missing or the two answers differ."""
    first = await _send_all(port, prompts, stream=False, together=2)
    second = await _send_all(port, prompts[::-1], stream=True, together=12)
    for prompt, *both in zip(prompts, first, second[::-1], strict=True):
        for record in both:
            if not record.done or not record.answer:
                raise ServerError(
                    f"a prompt to {prompt.route} without faults: {record.status} {record.reason} {record.broken}"
                )
        if both[0].answer != both[1].answer:
            raise ServerError(f"two answers of {prompt.route} without faults: {both[0].answer!r}, {both[1].answer!r}")
    return [record.answer for record in first]


async def _send_all(port: int, prompts: Sequence[Prompt], stream: bool, together: int) -> list[RequestRecord]:
    bare, room = BareClient(port), asyncio.Semaphore(together)

    async def one(prompt: Prompt) -> RequestRecord:
        record = RequestRecord(0, "baseline", stream=stream)
        async with room:
            return await run_with_limit(bare(prompt, record, {}), record)

    return list(await asyncio.gather(*map(one, prompts)))
