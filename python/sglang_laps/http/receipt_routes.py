"""``GET /laps_receipts`` and ``GET /laps_trace`` of SGLang's HTTP application."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import Query, Response
from laps_core.length import ClassName
from laps_core.receipts import recent, timeline
from laps_core.receipts.extract import Extract
from laps_core.receipts.receipt import RECEIPTS_ROUTE, TRACE_ROUTE, Receipt, Receipts
from sglang.srt.entrypoints.http_server import app, get_global_state

from sglang_laps.http import answering
from sglang_laps.http.routes import reply, serve
from sglang_laps.telemetry.receipts import ask

SLOWEST = 20
"""Number of receipts in the answer if the query does not say which receipts."""
LONGEST_S = 600.0
"""Longest timeline (seconds)."""
OLDEST_S = 1e9
"""Largest age of a receipt that a query can ask for (seconds)."""


async def _ask(query: recent.Query) -> list[Any]:
    return await ask(get_global_state().tokenizer_manager, query)


@serve(app, RECEIPTS_ROUTE)
async def laps_receipts(
    rid: str | None = None,
    slowest: Annotated[int | None, Query(ge=1)] = None,
    cls: Annotated[ClassName | None, Query(alias="class")] = None,
    seconds: Annotated[float | None, Query(gt=0.0, le=OLDEST_S)] = None,
) -> Response:
    """Return receipts of the last requests. Filters: ``rid``; ``class``; first token in the last ``seconds``; the
    number of the ``slowest``, slowest first. Without rid, slowest and seconds: the slowest 20."""
    if rid is None and seconds is None:
        slowest = slowest or SLOWEST
    ranks = await _ask(recent.Query(rid=rid, slowest=slowest, cls=cls, seconds=seconds))
    # Decoding thousands of receipts here would block other requests.
    return reply((200, await asyncio.to_thread(_encode_receipts, ranks, slowest)))


def _encode_receipts(ranks: list[Any], slowest: int | None) -> bytes:
    found = [answering.outside_times.complete(msgspec.json.decode(text)) for rank in ranks for text in rank["receipts"]]
    if slowest is not None:
        found = sorted(found, key=lambda receipt: -receipt["ttft_ms"])[:slowest]
    answer = Receipts(receipts=msgspec.convert(found, list[Receipt]), kept=sum(rank["kept"] for rank in ranks))
    return msgspec.json.encode(answer)


@serve(app, TRACE_ROUTE)
async def laps_trace(seconds: Annotated[float, Query(gt=0.0, le=LONGEST_S)] = 30.0) -> Response:
    """Return Chrome trace events of the last ``seconds``, for Perfetto."""
    ranks = await _ask(recent.Query(timeline=True, seconds=seconds))
    return reply((200, await asyncio.to_thread(_encode_trace, ranks)))


def _encode_trace(ranks: list[Any]) -> bytes:
    extracts = [msgspec.msgpack.decode(rank["timeline"], type=Extract) for rank in ranks]
    return msgspec.json.encode(timeline.trace(sorted(extracts, key=lambda x: x.dp_rank)))
