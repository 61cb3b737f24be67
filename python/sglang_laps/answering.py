"""Receipts in the HTTP server: each gets the time that the answer took from the scheduler, and leaves with its request:
in ``meta_info``, in a header where the client asks for one, and as attributes of its span where requests are traced."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
from laps_core.receipts.receipt import META_KEY, RECEIPT_HEADER
from laps_core.receipts.recent import MOST

from sglang_laps import seams

_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_HEADER = RECEIPT_HEADER.encode()
_asked: ContextVar[list[Asked] | None] = ContextVar("laps_receipts", default=None)
"""Receipts of the HTTP request that is served, where it asks for them."""
_arrival: ContextVar[float] = ContextVar("laps_came", default=0.0)
"""When the HTTP request that is served had come (``time.perf_counter``): SGLang's own stamp is of its parsed body."""
Message = MutableMapping[str, Any]


def hook() -> None:
    """Have the tokenizer manager hand receipts on; once, however often it is called."""
    if seams.hooked(f"{_MANAGER}.update_request_meta_info"):
        return
    seams.hook(f"{_MANAGER}.update_request_meta_info", _came, "AROUND")
    seams.hook(f"{_MANAGER}._stream_one_response", _answers, "AROUND")
    seams.hook(f"{_MANAGER}.convert_to_span_attrs", _attributes, "AFTER")


class Asked(NamedTuple):
    """A receipt for a header."""

    receipt: dict[str, Any]
    in_time: bool
    """True if it leaves with the first token."""

    def as_header(self) -> bytes:
        """The receipt as JSON, with the time until now where the first token leaves."""
        if self.in_time:
            us = round(1e6 * (time.perf_counter() - _arrival.get())) - round(1e3 * self.receipt["ttft_ms"])
            Outside(0, us).add_to(self.receipt)
        return json.dumps(self.receipt, separators=(",", ":")).encode()


class Outside(NamedTuple):
    """Time of a request that its scheduler does not see (microseconds)."""

    before: int
    """Until its body was parsed."""
    after: int
    """From the scheduler to its answer."""

    def add_to(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """Add it to a receipt as from the scheduler; return that."""
        causes = receipt["causes"]
        for cause, us in (("tokenizing", self.before), ("answering", self.after)):
            if us > 0:
                causes[cause] = round(causes.get(cause, 0.0) + us / 1e3, 3)
                receipt["ttft_ms"] = round(receipt["ttft_ms"] + us / 1e3, 3)
        receipt["arrived_s"] -= self.before / 1e6
        return receipt


class Answered:
    """The same of the last requests."""

    def __init__(self, most: int = MOST) -> None:
        self._last: OrderedDict[str, Outside] = OrderedDict()
        self._most = most

    def add(self, rid: str, outside: Outside) -> None:
        """Keep one more, and forget the oldest where there are too many."""
        self._last[rid] = outside
        if len(self._last) > self._most:
            self._last.popitem(last=False)

    def complete(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """Add to a receipt what is known here; return it."""
        known = self._last.get(receipt["rid"])
        return receipt if known is None else known.add_to(receipt)


answered = Answered()
"""The answers of this process: with several, each knows its own."""


def _came(
    original: Callable[..., Any], manager: Any, meta_info: Any, state: Any, info: Any, index: int, *more: Any
) -> Any:
    """Around ``update_request_meta_info``, which would make a list of tokens of it."""
    if META_KEY in info:
        for found in info[META_KEY][index] or ():
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
                in_time = _leaves(receipt, state)
                if isinstance(out.get("meta_info"), dict):
                    out["meta_info"][META_KEY] = receipt
                if (asked := _asked.get()) is not None:
                    asked.append(Asked({**receipt, "causes": dict(receipt["causes"])}, in_time))
            yield out


def _leaves(receipt: dict[str, Any], state: Any) -> bool:
    """Add what the scheduler does not see; return True if the first token leaves now."""
    created_s: float = state.time_stats.created_time
    # With a later token, when the first one would have left is not known.
    in_time: bool = state.laps_receipt_is_in_time and created_s > 0.0
    before_us = round(1e6 * (created_s - (_arrival.get() or created_s)))
    after_us = round(1e6 * (time.perf_counter() - created_s)) - round(1e3 * receipt["ttft_ms"]) if in_time else 0
    outside = Outside(before_us, after_us)
    answered.add(receipt["rid"], outside)
    outside.add_to(receipt)
    return in_time


def _attributes(attributes: dict[str, Any], _: Any, state: Any, *more: Any) -> dict[str, Any]:
    """After ``convert_to_span_attrs``: the causes as attributes of the request's span, in milliseconds."""
    if (receipt := state.__dict__.get("laps_receipt")) is not None:
        attributes.update({f"laps.causes_ms.{cause}": ms for cause, ms in receipt["causes"].items()})
        attributes["laps.behind"] = [other["rid"] for other in receipt["behind"]]
    return attributes


class ReceiptHeader:
    """ASGI middleware: stamps each request as it comes. A response has the receipt in a header where its request asks
    for it; it begins with its body then, as late as its first token."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        """Serve one request."""
        _arrival.set(time.perf_counter())
        if scope["type"] != "http" or (_HEADER, b"1") not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        found: list[Asked] = []
        begin: Message | None = None

        async def sends(message: Message) -> None:
            nonlocal begin
            if message["type"] == "http.response.start":
                begin = message
                return
            if begin is not None:
                if found:
                    slowest = max(found, key=lambda asked: float(asked.receipt["ttft_ms"]))
                    begin["headers"] = [*begin["headers"], (_HEADER, slowest.as_header())]
                first, begin = begin, None
                await send(first)
            await send(message)

        token = _asked.set(found)
        try:
            await self._app(scope, receive, sends)
        finally:
            _asked.reset(token)
