"""Emulated servers with one scheduler process for each rank of a group."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from benchmark.rig import architectures, devices
from benchmark.rig.devices import Device
from benchmark.rig.variants import LAPS, ON, SPF, Variant
from benchmark.suites.groups.loads import Load

PROFILE, MODEL = "h200-deepseek-v3-dp8", "deepseek3"
CHUNK = 8192
"""Most new tokens of a rank's batch."""
CONTEXT = 131_072 + 1024
POOL = 1_500_000
"""Tokens that a rank keeps: of sessions that are under way, and some that are over."""
LAYERS = 2
"""Layers of the tiny model where a rank keeps so many tokens: one dense, one with experts."""
_YARN = {**architectures.DEEPSEEK["rope_parameters"], "original_max_position_embeddings": -(-CONTEXT // 4)}
LONG = (
    "--context-length", str(CONTEXT), "--max-total-tokens", str(POOL), "--json-model-override-args",
    json.dumps({"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT, "rope_parameters": _YARN}),
)  # fmt: skip
"""Arguments of servers whose prompts are longer than what the tiny model was made for."""


def device_of(load: Load, slow: float, ranks: int) -> Device:
    """Return the emulated group for a load."""
    made = devices.emulated(f"{PROFILE},slow={slow:g}")
    if load.sessions:
        made = made.with_prefixes()
    # SGLang needs a core for each rank, out of those that it may use.
    usable = sorted(os.sched_getaffinity(0))
    env = {**made.env, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(usable[i % len(usable)]) for i in range(ranks))}
    return replace(
        made,
        args=(*made.args, *(LONG if load.sessions else ())),
        env=env,
        checkpoint=lambda: architectures.make(devices.MODELS, MODEL),
        start_s=600.0,
        sleeps=False,
    )


def variants(load: Load, ranks: int) -> list[Variant]:
    """Return stock's best policy for this load, and LAPS. SGLang divides the chunk by the number of ranks."""
    group = (
        *("--tp-size", str(ranks), "--dp-size", str(ranks), "--enable-dp-attention"),
        *("--load-balance-method", "total_tokens", "--disable-overlap-schedule"),
        # SGLang keeps memory for a chunk that this machine does not have, though nothing as large runs.
        *("--mem-fraction-static", "0.5"),
    )
    chunks = {SPF: load.chunk, LAPS: CHUNK}
    own = {SPF: ("--schedule-policy", SPF), LAPS: (ON,)}
    return [Variant(n, (*group, *own[n], "--chunked-prefill-size", str(ranks * chunks[n]))) for n in chunks]
