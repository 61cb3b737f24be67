"""SGLang's HTTP application with the additions of LAPS: ``GET /laps_status``, ``POST /laps_pool``, the page ``/laps``,
receipts, quotes, replays, and checks of deadlines and prompts on arrival.

The launcher imports this module. With --tokenizer-worker-num > 1, every worker imports it by name, too.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from laps_core.protocol import POOL_ROUTE, STATUS_ROUTE
from msgspec import to_builtins
from sglang.srt.entrypoints.http_server import app, get_global_state
from sglang.srt.plugins.hook_registry import HookRegistry

import sglang_laps.profile_warmup  # noqa: F401  (registers the warm-up)
from sglang_laps import options, seams
from sglang_laps.checks import prompts
from sglang_laps.http import (  # noqa: F401  (some add routes)
    answering,
    page_route,
    quote_routes,
    receipt_routes,
    replay_route,
    routes,
)
from sglang_laps.http.answer_cache import AnswerCache
from sglang_laps.http.pool import PoolCell
from sglang_laps.ranks import dp_size_by_room
from sglang_laps.telemetry import moments
from sglang_laps.telemetry.status import merge

__all__ = ["app"]

seams.require()
prompts.hook()
if (_config := options.from_env()) is not None and _config.receipts:
    moments.hook_senders()
    answering.hook()
    app.add_middleware(answering.ReceiptHeader)
HookRegistry.apply_hooks()
seams.require_applied()
page_route.add(app)


_pool = PoolCell.of_this_server()


async def _merged() -> dict[str, Any]:
    states = await get_global_state().tokenizer_manager.get_internal_state()
    return merge([s["laps"] for s in states if "laps" in s])


_status = AnswerCache(_merged)
quote_routes.add(app, _status)
replay_route.add(app, replay_route.Replays.of_this_server())


@routes.serve(app, STATUS_ROUTE)
async def laps_status(max_age_s: float = 0.0) -> dict[str, Any]:
    """Return the status of the LAPS scheduler; with several data-parallel ranks, "ranks" has an entry for each. Every
    answer costs the scheduler time: clients that ask often should accept an older one (``max_age_s``, seconds)."""
    status, age_s = await _status.get(max_age_s)
    return {**status, "age_s": round(age_s, 3), "pool": to_builtins(_pool.read()), "dp_size": dp_size_by_room()}


@routes.serve(app, POOL_ROUTE, "POST")
async def laps_pool(request: Request) -> Response:
    """Compare and set the pool of this server: the request is a PoolChange, the answer a PoolRecord."""
    return routes.reply(_pool.apply_change(await request.body()))
