"""SGLang's HTTP application with ``GET /laps_status`` added."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.http_server import app, get_global_state

from sglang_laps.status import merge

__all__ = ["app"]


@app.get("/laps_status")
async def laps_status() -> dict[str, Any]:
    """What the LAPS scheduler is doing; one entry a data-parallel rank under "ranks" where there are several."""
    states = await get_global_state().tokenizer_manager.get_internal_state()
    return merge([s["laps"] for s in states if "laps" in s])
