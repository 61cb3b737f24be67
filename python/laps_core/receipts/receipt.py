"""Receipts as they travel over HTTP: causes that add up to the time to first token of a request."""

from __future__ import annotations

from typing import Literal

import msgspec

from laps_core.length import ClassName

RECEIPTS_ROUTE = "laps_receipts"
"""``GET`` it of a server for a ``Receipts``: ``rid``, or ``slowest`` and ``class``, or ``seconds`` say which."""
TRACE_ROUTE = "laps_trace"
"""``GET`` it of a server for Chrome trace events of the last ``seconds``."""
RECEIPT_HEADER = "x-laps-receipt"
"""A client that sends 1 has the receipt in a header of the same name, as JSON."""
META_KEY = "laps_receipt"
"""Key of the receipt in the answer's ``meta_info``."""

Cause = Literal[
    "tokenizing",
    "decode_room",
    "behind_short",
    "behind_long",
    "behind_streams",
    "window",
    "gap",
    "memory",
    "ranks",
    "host_load",
    "prefetch",
    "computing",
    "preempted",
    "scheduling",
    "transfer",
    "answering",
    "router_queue",
    "router_retries",
    "router",
    "decode_server",
    "other",
]
"""tokenizing: until the scheduler has it. decode_room: until a decode server has room for it. behind_short,
behind_long, behind_streams: a batch of others, or a decode step, has the device. window, gap: it is held back on
purpose. memory: the KV cache is full. ranks: other data-parallel ranks are not done. host_load, prefetch: what the
cache holds of it comes from host memory or storage. computing: its own batches. preempted: batches of others within
them. scheduling: the device is idle, the host builds or launches. transfer: its KV goes to the decode server.
answering: from there to the HTTP server. router_queue, router_retries, router, decode_server: at the router, and
until the decode server's first event. other: none of these."""


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """A request that had the device while another waited."""

    rid: str
    tokens: int
    """New tokens of it that ran meanwhile."""
    ms: float
    """Device time of its batches meanwhile (milliseconds)."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Account of the time to first token of one request. Times in milliseconds unless the name says otherwise."""

    rid: str
    cls: ClassName = msgspec.field(name="class")
    arrived_s: float
    """When the server had it (Unix time)."""
    new_tokens: int
    cached_tokens: int
    ttft_ms: float
    causes: dict[Cause, float]
    """Milliseconds of each cause; they add up to ``ttft_ms``; those of no time are left out."""
    behind: tuple[Behind, ...] = ()
    """Requests that took the device from it longest, longest first."""
    left_out: int = 0
    """How many more there were."""
    dp_rank: int = 0
    aborted: bool = False
    output_tokens: int = 0
    quoted_ms: float | None = None
    """Predicted when it came; None = there was no quote."""


class Receipts(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /laps_receipts``."""

    receipts: list[Receipt]
    kept: int = 0
    """How many of the last requests are known."""
