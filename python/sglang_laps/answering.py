"""Receipts in the HTTP server: each gets the time that the answer took from the scheduler, and leaves with its request:
in ``meta_info``, in a header where the client asks for one, and as attributes of its span where requests are traced."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import msgspec
from laps_core.receipts.receipt import META_KEY, RECEIPT_HEADER
from laps_core.receipts.recent import MOST

from sglang_laps import seams

_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_HEADER = RECEIPT_HEADER.encode()
_asked: ContextVar[list[dict[str, Any]] | None] = ContextVar("laps_receipts", default=None)
"""Receipts of the HTTP request that is served, where it asks for them."""
Message = MutableMapping[str, Any]


def hook() -> None:
    """Have the tokenizer manager hand receipts on."""
    seams.hook(f"{_MANAGER}.update_request_meta_info", _came, "AROUND")
    seams.hook(f"{_MANAGER}._stream_one_response", _answers, "AROUND")
    seams.hook(f"{_MANAGER}.convert_to_span_attrs", _attributes, "AFTER")


class Answered:
    """How long the last answers took from the scheduler to their clients, by request."""

    def __init__(self, most: int = MOST) -> None:
        self._us: OrderedDict[str, int] = OrderedDict()
        self._most = most

    def add(self, rid: str, us: int) -> None:
        """Keep one more (microseconds), and forget the oldest where there are too many."""
        self._us[rid] = us
        if len(self._us) > self._most:
            self._us.popitem(last=False)

    def complete(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """Add to a receipt how long the answer took, if that is known here; return it."""
        _add_answering(receipt, self._us.get(receipt["rid"], 0))
        return receipt


answered = Answered()
"""Of this process: with several of them each knows its own."""


def _add_answering(receipt: dict[str, Any], us: int) -> None:
    if us > 0:
        causes = receipt["causes"]
        causes["answering"] = round(causes.get("answering", 0.0) + us / 1e3, 3)
        receipt["ttft_ms"] = round(receipt["ttft_ms"] + us / 1e3, 3)


def _came(
    original: Callable[..., Any], manager: Any, meta_info: Any, state: Any, info: Any, index: int, *more: Any
) -> Any:
    """Around ``update_request_meta_info``, which would make a list of tokens of it."""
    if META_KEY in info:
        if found := info[META_KEY][index]:
            text, state.laps_receipt_is_in_time = found
            state.laps_receipt, state.laps_receipt_left = msgspec.json.decode(text), False
        info = {key: value for key, value in info.items() if key != META_KEY}
    return original(manager, meta_info, state, info, index, *more)


async def _answers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Around ``_stream_one_response``: the receipt goes with the first answer after it came."""
    state = kwargs["state"] if "state" in kwargs else args[2]
    async with aclosing(original(*args, **kwargs)) as answers:
        async for out in answers:
            receipt = state.__dict__.get("laps_receipt")
            if receipt is not None and not state.laps_receipt_left:
                state.laps_receipt_left = True
                _leaves(receipt, state)
                if isinstance(out.get("meta_info"), dict):
                    out["meta_info"][META_KEY] = receipt
                if (asked := _asked.get()) is not None:
                    asked.append(receipt)
            yield out


def _leaves(receipt: dict[str, Any], state: Any) -> None:
    created_s: float = state.time_stats.created_time
    # With a later token, how long the first one would have taken is not known.
    if state.laps_receipt_is_in_time and created_s > 0.0:
        us = round(1e6 * (time.perf_counter() - created_s)) - round(1e3 * receipt["ttft_ms"])
        _add_answering(receipt, us)
        answered.add(receipt["rid"], us)


def _attributes(attributes: dict[str, Any], _: Any, state: Any, *more: Any) -> dict[str, Any]:
    """After ``convert_to_span_attrs``: the causes as attributes of the request's span, in milliseconds."""
    if (receipt := state.__dict__.get("laps_receipt")) is not None:
        attributes.update({f"laps.causes_ms.{cause}": ms for cause, ms in receipt["causes"].items()})
        attributes["laps.behind"] = [other["rid"] for other in receipt["behind"]]
    return attributes


class ReceiptHeader:
    """ASGI middleware: a response has the receipt in a header where its request asks for it. It begins with its body
    then, as late as its first token."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        """Serve one request."""
        if scope["type"] != "http" or (_HEADER, b"1") not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        found: list[dict[str, Any]] = []
        begin: Message | None = None

        async def sends(message: Message) -> None:
            nonlocal begin
            if message["type"] == "http.response.start":
                begin = message
                return
            if begin is not None:
                if found:
                    slowest = max(found, key=lambda receipt: receipt["ttft_ms"])
                    text = json.dumps(slowest, separators=(",", ":")).encode()
                    begin["headers"] = [*begin["headers"], (_HEADER, text)]
                first, begin = begin, None
                await send(first)
            await send(message)

        token = _asked.set(found)
        try:
            await self._app(scope, receive, sends)
        finally:
            _asked.reset(token)
