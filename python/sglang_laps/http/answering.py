"""Receipts in the HTTP server. It adds the times that the scheduler does not see, and delivers each receipt in
``meta_info``, in a header if the client asks for one, and in the request's span if requests are traced."""

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
LONGEST_HEADER = 3000
"""Longest receipt in a header (bytes): proxies refuse long headers, and a character of an id can take 12 bytes. A
longer receipt leaves out the other requests' ids."""
_asked: ContextVar[list[HeaderReceipt] | None] = ContextVar("laps_receipts", default=None)
"""Receipts of the current HTTP request, if its client asks for the header; else None."""
_arrival: ContextVar[float] = ContextVar("laps_arrival", default=0.0)
"""Arrival of the current HTTP request (``time.perf_counter``). SGLang's own stamp comes after the body is parsed."""
Message = MutableMapping[str, Any]


def hook() -> None:
    """Have the tokenizer manager deliver receipts. Further calls have no effect."""
    if seams.hooked(f"{_MANAGER}.update_request_meta_info"):
        return
    seams.hook(f"{_MANAGER}.update_request_meta_info", _keep_receipt, "AROUND")
    seams.hook(f"{_MANAGER}._stream_one_response", _deliver_receipt, "AROUND")
    seams.hook(f"{_MANAGER}.convert_to_span_attrs", _attributes, "AFTER")


class HeaderReceipt(NamedTuple):
    """A receipt for the header of a response."""

    receipt: dict[str, Any]
    in_time: bool
    """True if the receipt leaves with the first token."""

    def as_header(self) -> bytes:
        """Return the receipt as JSON. If it leaves with the first token, first add the time until now."""
        if self.in_time:
            us = round(1e6 * (time.perf_counter() - _arrival.get())) - round(1e3 * self.receipt["ttft_ms"])
            Outside(0, us).add_to(self.receipt)
        text = json.dumps(self.receipt, separators=(",", ":"))
        if len(text) > LONGEST_HEADER:
            left_out = self.receipt["left_out"] + len(self.receipt["behind"])
            text = json.dumps({**self.receipt, "behind": [], "left_out": left_out}, separators=(",", ":"))
        return text.encode()


class Outside(NamedTuple):
    """Times of a request that its scheduler does not see (microseconds)."""

    before: int
    """Time until the body was parsed."""
    after: int
    """Time from the scheduler to the answer."""

    def add_to(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """Add both times to a receipt as the scheduler sent it; return the receipt."""
        causes = receipt["causes"]
        for cause, us in (("tokenizing", self.before), ("answering", self.after)):
            if us > 0:
                causes[cause] = round(causes.get(cause, 0.0) + us / 1e3, 3)
                receipt["ttft_ms"] = round(receipt["ttft_ms"] + us / 1e3, 3)
        receipt["arrived_s"] -= self.before / 1e6
        return receipt


class OutsideTimes:
    """Times outside the scheduler of the last `most` requests."""

    def __init__(self, most: int = MOST) -> None:
        self._last: OrderedDict[str, Outside] = OrderedDict()
        self._most = most

    def add(self, rid: str, outside: Outside) -> None:
        """Keep the times of a request; drop the oldest entry if there are more than `most`."""
        self._last[rid] = outside
        if len(self._last) > self._most:
            self._last.popitem(last=False)

    def complete(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """Add the stored times of its request, if any, to a receipt; return the receipt."""
        known = self._last.get(receipt["rid"])
        return receipt if known is None else known.add_to(receipt)


outside_times = OutsideTimes()
"""Answers of this process. If several processes serve HTTP, each knows only its own answers."""


def _keep_receipt(
    original: Callable[..., Any], manager: Any, meta_info: Any, state: Any, info: Any, index: int, *more: Any
) -> Any:
    """Wrap ``update_request_meta_info``, which would collect receipts in a list, like values of tokens."""
    if META_KEY in info:
        for found in info[META_KEY][index] or ():
            text, state.laps_receipt_is_in_time = found
            state.laps_receipt, state.laps_receipt_left = msgspec.json.decode(text), False
        info = {key: value for key, value in info.items() if key != META_KEY}
    return original(manager, meta_info, state, info, index, *more)


async def _deliver_receipt(original: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Wrap ``_stream_one_response``: the first answer after a receipt has arrived carries the receipt."""
    state = kwargs["state"] if "state" in kwargs else args[2]
    async with aclosing(original(*args, **kwargs)) as answers:
        async for out in answers:
            receipt = state.__dict__.get("laps_receipt")
            if receipt is not None and not state.laps_receipt_left:
                state.laps_receipt_left = True
                in_time = _add_outside_times(receipt, state)
                if isinstance(out.get("meta_info"), dict):
                    out["meta_info"][META_KEY] = receipt
                if (asked := _asked.get()) is not None:
                    asked.append(HeaderReceipt({**receipt, "causes": dict(receipt["causes"])}, in_time))
            yield out


def _add_outside_times(receipt: dict[str, Any], state: Any) -> bool:
    """Add the times that the scheduler does not see; return True if the first token leaves now."""
    created_s: float = state.time_stats.created_time
    # If the receipt leaves with a later token, the time at which the first token left is unknown.
    in_time: bool = state.laps_receipt_is_in_time and created_s > 0.0
    before_us = round(1e6 * (created_s - (_arrival.get() or created_s)))
    after_us = round(1e6 * (time.perf_counter() - created_s)) - round(1e3 * receipt["ttft_ms"]) if in_time else 0
    outside = Outside(before_us, after_us)
    outside_times.add(receipt["rid"], outside)
    outside.add_to(receipt)
    return in_time


def _attributes(attributes: dict[str, Any], _: Any, state: Any, *more: Any) -> dict[str, Any]:
    """Add the causes (milliseconds) and the `behind` ids of a receipt to what ``convert_to_span_attrs`` returned."""
    if (receipt := state.__dict__.get("laps_receipt")) is not None:
        attributes.update({f"laps.causes_ms.{cause}": ms for cause, ms in receipt["causes"].items()})
        attributes["laps.behind"] = [other["rid"] for other in receipt["behind"]]
    return attributes


class ReceiptHeader:
    """ASGI middleware that records each request's arrival, and adds the receipt as a header if the client asks for it.
    Such a response starts only when its body does, with the first token."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        _arrival.set(time.perf_counter())
        if scope["type"] != "http" or (_HEADER, b"1") not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        found: list[HeaderReceipt] = []
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
