"""SGLang's HTTP application with what LAPS adds to it: ``GET /laps_status``, and checks of deadlines and
prompts at the door.

The launcher imports it, and with --tokenizer-worker-num > 1 so does every worker, by name.
"""

from __future__ import annotations

from typing import Any

from laps_core.protocol import STATUS_ROUTE
from sglang.srt.entrypoints.http_server import app, get_global_state
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import sglang_laps.profile  # noqa: F401  (registers the warm-up)
from sglang_laps import deadlines, prompts
from sglang_laps.status import merge

__all__ = ["app"]

HookRegistry.register("sglang.srt.sampling.sampling_params.SamplingParams.verify", deadlines.verify, HookType.AROUND)
HookRegistry.register(prompts.VALIDATE, prompts.validate, HookType.AROUND)
HookRegistry.apply_hooks()


@app.get(f"/{STATUS_ROUTE}")
async def laps_status() -> dict[str, Any]:
    """What the LAPS scheduler is doing; one entry a data-parallel rank under "ranks" where there are several."""
    states = await get_global_state().tokenizer_manager.get_internal_state()
    return merge([s["laps"] for s in states if "laps" in s])
