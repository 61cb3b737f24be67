"""Two clients of the router, the openai package and bare HTTP; both fill in the same ``Seen``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import openai

from benchmark.faults import wire
from benchmark.faults.evidence import MARKER
from benchmark.faults.oracle import Seen
from benchmark.faults.prompts import CHAT, GENERATE, Prompt

HUNG_S = 75.0
"""A request without an end after this long hangs: longer than the router's own limit."""

Ask = Callable[[Prompt, Seen, Mapping[str, Any]], Awaitable[None]]


class Bare:
    """A connection a request, HTTP by hand. Any route."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __call__(self, prompt: Prompt, seen: Seen, extra: Mapping[str, Any]) -> None:
        """Send the prompt with ``extra`` in its body; read the answer into ``seen`` as it comes."""
        body = {**prompt.body, "stream": seen.stream, **extra}
        try:
            with await wire.Connection.to(self._port) as connection:
                raw = json.dumps(body).encode()
                await connection.send(wire.request(prompt.route, raw, {MARKER: str(seen.number)}))
                reply = await connection.reply()
                if seen.stream and reply.status < 400:
                    seen.status = reply.status
                    await self._stream(prompt.route, reply, seen)
                else:
                    data = await reply.body()
                    seen.status = reply.status
                    if reply.status >= 400:
                        seen.reason = wire.reason(data)
                    else:
                        read_whole(prompt.route, json.loads(data), seen)
        except (wire.Broken, OSError, ValueError) as e:
            seen.broken = f"{type(e).__name__}: {e}"[:200]

    async def _stream(self, route: str, reply: wire.Reply, seen: Seen) -> None:
        last = failed = False
        async for data in wire.events(reply.pieces()):
            # SGLang ends a stream that failed with both an error and this.
            done = data == b"[DONE]"
            if last or (failed and not done):
                raise wire.Broken(f"an event after the last one: {data[:60]!r}")
            last = done
            if not done:
                event = json.loads(data)
                if event.get("error"):
                    seen.reason, failed = wire.told(event) or "an error", True
                else:
                    read_event(route, event, seen)
        seen.done = seen.done and last and not failed


class OpenAi:
    """The openai package: completions and chats."""

    def __init__(self, port: int) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=HUNG_S + 5.0
        )

    async def __call__(self, prompt: Prompt, seen: Seen, extra: Mapping[str, Any]) -> None:
        """Send the prompt with ``extra`` in its body; read the answer into ``seen`` as it comes."""
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
                read_whole(prompt.route, answer.model_dump(), seen)
                return
            async with answer:
                async for event in answer:
                    read_event(prompt.route, event.model_dump(), seen)
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
            # What httpx raises while a stream is read is not wrapped by the package.
            seen.broken = f"{type(e).__name__}: {e}"[:200]

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()


def read_whole(route: str, reply: Any, seen: Seen) -> None:
    """A whole reply."""
    if isinstance(reply, dict) and reply.get("error"):
        seen.reason = wire.told(reply)
        return
    if route == GENERATE:
        many = reply if isinstance(reply, list) else [reply]
        got = [list(r["output_ids"]) for r in many]
        seen.got = got if isinstance(reply, list) else got[0]
        ended = [(r["meta_info"]["finish_reason"] or {}).get("type", "") for r in many]
        seen.reason, seen.done = " ".join(ended), all(ended)
        return
    choice = reply["choices"][0]
    seen.got = choice["message"]["content"] if route == CHAT else choice["text"]
    seen.reason = choice["finish_reason"] or ""
    seen.done = bool(seen.reason)


def read_event(route: str, event: Any, seen: Seen) -> None:
    """One event of a stream."""
    seen.begun = True
    if route == GENERATE:
        seen.got = list(event["output_ids"])
        ended = event["meta_info"]["finish_reason"]
        if ended:
            seen.reason, seen.done = ended["type"], True
        return
    for choice in event["choices"]:
        piece = choice["delta"].get("content") if route == CHAT else choice["text"]
        seen.got = (seen.got or "") + (piece or "")
        if choice["finish_reason"]:
            seen.reason, seen.done = choice["finish_reason"], True


async def bounded(call: Awaitable[None], seen: Seen, clock: Callable[[], float], leave_s: float | None = None) -> Seen:
    """Run one request to its end, to the client's leaving (``leave_s`` seconds), or to the limit."""
    seen.begin = clock()
    try:
        async with asyncio.timeout(HUNG_S if leave_s is None else leave_s):
            await call
    except TimeoutError:
        seen.left, seen.hung = leave_s is not None, leave_s is None
    seen.end = clock()
    return seen
