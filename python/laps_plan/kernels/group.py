"""The profile of DeepSeek-V3 as a group of data-parallel attention ranks with expert parallelism, on eight H200.

    python -m laps_plan.kernels.group     write it again, in its place

Its kernels are those that AIConfigurator 0.12.0 ships for SGLang's wide expert parallelism on H200, FP8, read by hand,
for its estimates know no own part of a rank: ``wideep_context_mla`` (fa3), ``wideep_context_moe`` (8 ranks, power
law 1.01), ``wideep_deepep_normal`` (24 SMs), and the projections as GEMM. Times SLACK, so that full steps give 55,500,
54,000 and 51,200 tokens/s a node for prompts of 1,024, 2,048 and 4,096 tokens; LMSYS has published 52,300 for 2,048 and
50,300 for 4,096 (8 H100 a node, 32 experts' ranks). Assumed and not measured: unpacking of a history (roofline: reading
the packed cache, writing and reading K and V), all floors, the host.
"""

from __future__ import annotations

import sys

from laps_core.group.cost import GroupCost
from laps_core.latency.step import Coefficients

from laps_plan.profile import FOLDER, Profile

NAME, LAYERS, RANKS = "h200-deepseek-v3-dp8", 61, 8
SLACK = 1.25
PROJECTIONS, EXCHANGE, SHARED = 25.6e-6, 24.9e-6, 12.5e-6
"""Own part per token (seconds, SLACK included): projections of attention; DeepEP's dispatch and combine; the shared
expert and norms."""
PAIR, PACKED_PAIR = 7.9e-9, 33e-9
"""A query on a key in all layers (seconds): K and V unpacked; absorbed, on the packed cache."""
UNPACK = 4.4e-6
"""A cached token, in each chunk anew (seconds)."""
EXPERTS = 75.6e-6
"""Experts per token on one of the devices (seconds)."""


def deepseek() -> Profile:
    """DeepSeek-V3, eight ranks of one device each."""
    group = GroupCost(
        ranks=RANKS,
        fixed=0.008,
        token=PROJECTIONS + EXCHANGE + SHARED,
        alpha=PAIR / 2,
        unpack=UNPACK,
        absorbed=PACKED_PAIR / 2,
        own_floor=0.015,
        expert=EXPERTS / RANKS,
        expert_floor=0.027,
    )
    alone = Coefficients(group.alpha, group.token + group.expert, group.unpack, 0.0, group.step_s)
    details = {
        "system": "h200_sxm", "model": "DeepSeek-V3", "attention_data_parallel": RANKS, "expert_parallel": RANKS,
        "aiconfigurator": "0.12.0", "slack": SLACK,
        "tables": ["wideep_context_mla", "wideep_context_moe", "wideep_deepep_normal"],
        "assumed": ["unpack", "own_floor", "expert_floor", "fixed", "step_host_s"],
    }  # fmt: skip
    return Profile(
        name=NAME,
        source="kernels measured by NVIDIA (AIConfigurator 0.12.0: sglang wide-EP tables on h200_sxm) x 1.25; "
        "unpacking of histories, floors and host times assumed",
        coefficients=alone,
        step_host_s=0.004,
        layers=LAYERS,
        ahead=True,
        group=group,
        details=details,
    )


def main() -> int:
    """Write it."""
    made = deepseek()
    made.save(FOLDER / f"{made.name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
