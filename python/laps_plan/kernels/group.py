"""Profiles of groups of data-parallel attention ranks with expert parallelism, on eight H200.

    python -m laps_plan.kernels.group     write the profiles again, in place

DeepSeek-V3's kernels are those that AIConfigurator 0.12.0 ships for SGLang's wide expert parallelism on H200, FP8:
``wideep_context_mla`` (fa3), ``wideep_context_moe`` (8 ranks, power law 1.01), ``wideep_deepep_normal`` (24 SMs), and
the projections as GEMM. They are read by hand, because AIConfigurator's estimates do not separate the own part of a
rank. Times SLACK, so that full steps give 55,500, 54,000 and 51,200 tokens/s a node for prompts of 1,024, 2,048 and
4,096 tokens; LMSYS has published 52,300 for 2,048 and 50,300 for 4,096 (8 H100 a node, 32 expert ranks). Assumed and
not measured: unpacking of a history (roofline: reading the packed cache, writing and reading K and V), all floors, the
host.

Qwen3-235B-A22B-FP8 is fitted to AIConfigurator's estimates (sglang 0.5.14, attention DP 8, expert parallelism 8; 16 to
8,192 new tokens a rank, histories up to 32,768), which separate the parts of a step, times the same SLACK. The host is
assumed.
"""

from __future__ import annotations

import sys
from typing import Any

from laps_core.group.cost import GroupCost
from laps_core.latency.step import Coefficients

from laps_plan.profile import FOLDER, Profile

RANKS = 8
SLACK = 1.25
HOST_S, STEP_HOST_S = 0.008, 0.004
"""Assumed host time of every step (seconds): for launches and synchronising the ranks; for the scheduler."""
PROJECTIONS, EXCHANGE, SHARED = 25.6e-6, 24.9e-6, 12.5e-6
"""Own part per token (seconds, SLACK included): projections; DeepEP's dispatch and combine; shared expert and norms."""
PAIR, PACKED_PAIR = 7.9e-9, 33e-9
"""Attention of a query to a key in all layers (seconds): with K and V unpacked; absorbed, on the packed cache."""
UNPACK = 4.4e-6
"""Time to unpack one cached token, again in each chunk (seconds)."""
EXPERTS = 75.6e-6
"""Time of the experts per token on one device (seconds)."""


QWEN_TOKEN, QWEN_PAIR, QWEN_EXPERTS = 43.4e-6, 2.3e-9, 122e-6
"""Own part per token: projections, norms, router, dispatch and combine; attention per L (L + 2H), over K and V as
stored in the cache; experts per token on one device (seconds, without SLACK)."""
QWEN_OWN_S, QWEN_EXPERTS_S = 0.012, 0.0115
"""Fixed time of the own part, added to its time per token; least time of the experts (seconds, without SLACK)."""


def deepseek() -> Profile:
    """Return the profile of DeepSeek-V3 on eight ranks of one device each."""
    group = GroupCost(
        ranks=RANKS,
        fixed=HOST_S,
        token=PROJECTIONS + EXCHANGE + SHARED,
        alpha=PAIR / 2,
        unpack=UNPACK,
        absorbed=PACKED_PAIR / 2,
        own_floor=0.015,
        expert=EXPERTS / RANKS,
        expert_floor=0.027,
    )
    tables = ["wideep_context_mla", "wideep_context_moe", "wideep_deepep_normal"]
    assumed = ["unpack", "own_floor", "expert_floor", "fixed", "step_host_s"]
    return _profile(
        "h200-deepseek-v3-dp8",
        "kernels measured by NVIDIA (AIConfigurator 0.12.0: sglang wide-EP tables on h200_sxm) x 1.25; "
        "unpacking of histories, floors and host times assumed",
        61,
        group,
        {"model": "DeepSeek-V3", "tables": tables, "assumed": assumed},
    )


def qwen() -> Profile:
    """Return the profile of Qwen3-235B-A22B-FP8 on eight ranks of one device each."""
    group = GroupCost(
        ranks=RANKS,
        fixed=HOST_S + SLACK * QWEN_OWN_S,
        token=SLACK * QWEN_TOKEN,
        alpha=SLACK * QWEN_PAIR,
        expert=SLACK * QWEN_EXPERTS / RANKS,
        expert_floor=SLACK * QWEN_EXPERTS_S,
    )
    return _profile(
        "h200-qwen3-235b-a22b-dp8",
        "kernels measured by NVIDIA (AIConfigurator 0.12.0: sglang 0.5.14 on h200_sxm) x 1.25; host times assumed",
        94,
        group,
        {"model": "Qwen3-235B-A22B-FP8", "assumed": ["slack", "fixed", "step_host_s"]},
    )


def _profile(name: str, source: str, layers: int, group: GroupCost, details: dict[str, Any]) -> Profile:
    alone = Coefficients(group.alpha, group.token + group.expert, group.unpack, 0.0, group.step_s)
    shared = {
        "system": "h200_sxm", "attention_data_parallel": RANKS, "expert_parallel": RANKS, "aiconfigurator": "0.12.0",
        "slack": SLACK,
    }  # fmt: skip
    return Profile(
        name=name,
        source=source,
        coefficients=alone,
        step_host_s=STEP_HOST_S,
        layers=layers,
        ahead=True,
        group=group,
        details={**shared, **details},
    )


def main() -> int:
    """Write both profiles."""
    for made in (deepseek(), qwen()):
        made.save(FOLDER / f"{made.name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
