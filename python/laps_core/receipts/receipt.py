"""Receipts as sent over HTTP: causes that add up to the time to first token of a request."""

from __future__ import annotations

from typing import Literal

import msgspec

from laps_core.length import ClassName

RECEIPTS_ROUTE = "laps_receipts"
"""``GET`` route of a server: ``Receipts``, selected by ``rid``, or by ``slowest`` and ``class``, or by ``seconds``."""
TRACE_ROUTE = "laps_trace"
"""``GET`` route of a server: returns Chrome trace events of the last ``seconds``."""
RECEIPT_HEADER = "x-laps-receipt"
"""Header: if a client sends 1, the answer has the receipt in a header of the same name, as JSON."""
META_KEY = "laps_receipt"
"""Key of the receipt in the answer's ``meta_info``."""
AT_PREFILL = ".prefill"
"""End of an id at a prefill server behind the router; the client and the log of the router have the id without it.
Two seconds after a stream has ended, SGLang aborts its id again; without this end, that abort could hit KV that the
prefill server computes again for a decode server under the same id."""
LONGEST_ID = 128
"""Most characters of a request's id in receipts. Clients choose ids, and thousands are kept."""

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
"""tokenizing: until the scheduler has the request. decode_room: until a decode server has memory for it. behind_short,
behind_long, behind_streams: a batch of other requests, or a decode step, has the device. window: a short batch is held.
gap: the gap between preemptions is not over. memory: the KV cache is full, or no more requests may run. ranks: the
ranks run a step without the request. host_load, prefetch: its prefix is loaded from host memory or storage.
computing: its own batches run. preempted: other batches run within its own. scheduling: the device is idle, the host
builds or launches a batch.
transfer: until the decode server has its KV cache. answering: until the scheduler sends the answer. router_queue,
router_retries, router, decode_server: at the router, and until the decode server's first event. other: the rest."""


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """Request that had the device while another request waited."""

    rid: str
    tokens: int
    """New tokens of this request that ran meanwhile."""
    ms: float
    """Device time of this request's batches meanwhile (milliseconds)."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Account of the time to first token of one request. Times in milliseconds unless the name says otherwise."""

    rid: str
    cls: ClassName = msgspec.field(name="class")
    arrived_s: float
    """Arrival at the server (Unix time)."""
    new_tokens: int
    cached_tokens: int
    ttft_ms: float
    causes: dict[Cause, float]
    """Milliseconds of each cause, without causes of 0. The sum is ``ttft_ms``."""
    behind: tuple[Behind, ...] = ()
    """Requests that had the device for the most time while this request waited, longest first."""
    left_out: int = 0
    """Number of further such requests that ``behind`` does not name."""
    dp_rank: int = 0
    aborted: bool = False
    output_tokens: int = 0
    quoted_ms: float | None = None
    """Quoted median time to first token; None = no quote."""


class Receipts(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /laps_receipts``."""

    receipts: list[Receipt]
    kept: int = 0
    """Number of receipts that the server keeps."""
