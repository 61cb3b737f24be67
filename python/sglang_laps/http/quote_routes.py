"""``GET`` and ``POST /laps_quote``: the HTTP process answers from the state that the scheduler reported."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from laps_core.protocol import MAX_AGE
from laps_core.receipts.quote import MOST_ASKED, QUOTE_ROUTE, Ask, Quotes, QuoteState, quote

from sglang_laps.http.answer_cache import AnswerCache
from sglang_laps.http.errors import error
from sglang_laps.http.routes import reply, serve
from sglang_laps.telemetry.quotes import states

RANK = "dp_rank"
"""Query parameter: data-parallel rank to quote for. Without it, the quote is the longest of all ranks."""


def add(app: FastAPI, status: AnswerCache[dict[str, Any]]) -> None:
    """Add the routes. `status`: status of all ranks, as in /laps_status."""

    @serve(app, QUOTE_ROUTE, "GET", "POST")
    async def laps_quote(request: Request) -> Response:
        """Quote the time to first token of ``new`` and ``cached`` tokens, or of each entry of a list."""
        body = await request.body() if request.method == "POST" else None
        try:
            asked, rank, oldest_s = _read(request.query_params, body)
        except ValueError as e:
            return reply(error(400, str(e)))
        said, age_s = await status.get(oldest_s)
        return reply(answer(said, asked, rank, age_s, one=body is None))


def _read(query: Mapping[str, str], body: bytes | None) -> tuple[list[Ask], int | None, float]:
    """Return (requests to quote, rank, maximum age of the state in seconds). Raises ValueError."""
    given = dict(query)
    oldest_s = float(given.pop(MAX_AGE, 0.0))
    rank = int(given.pop(RANK)) if RANK in given else None
    if body is None:
        return [msgspec.convert(given, Ask, strict=False)], rank, oldest_s
    asked = msgspec.json.decode(body, type=list[Ask])
    if len(asked) > MOST_ASKED:
        raise ValueError(f"{len(asked)} requests in one question, at most {MOST_ASKED}")
    return asked, rank, oldest_s


def answer(status: dict[str, Any], asked: list[Ask], rank: int | None, age_s: float, *, one: bool) -> tuple[int, bytes]:
    """Return HTTP status and body of the answer. `one`: answer with the only quote instead of ``Quotes``."""
    longest, tokens = status.get("longest"), max((ask.new + ask.cached for ask in asked), default=0)
    if longest is not None and tokens > longest:
        return error(400, f"a prompt of {tokens} tokens: the server takes at most {longest}")
    found = [None if s is None else msgspec.convert(s, QuoteState) for s in states(status)]
    if rank is not None and not 0 <= rank < len(found):
        return error(400, f"{RANK} {rank}: there are {len(found)}")
    known = [s for s in (found if rank is None else [found[rank]]) if s is not None]
    if not known:
        why = status.get("reason") or "no step times are known yet"
        return error(503, f"no quote: {why}")
    quotes = [max((quote(s, ask.new, ask.cached) for s in known), key=attrgetter("ttft_ms")) for ask in asked]
    return 200, msgspec.json.encode(quotes[0] if one else Quotes(quotes=quotes, age_s=round(age_s, 3)))
