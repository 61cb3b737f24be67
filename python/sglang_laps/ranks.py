"""The ranks of one scheduler: one decides, all act on it."""

from __future__ import annotations

from typing import Any

import torch
from laps_core.scheduling.plan import Plan
from sglang.srt.runtime_context import get_parallel


class Ranks:
    """Of one tensor-parallel group."""

    def __init__(self, cpu_group: Any) -> None:
        parallel = get_parallel()
        self.leader: bool = parallel.attn_tp_rank == 0
        self.saves = first_of_all(parallel)
        """It alone writes files."""
        self._alone = parallel.attn_tp_size == 1
        self._group = cpu_group

    def agree(self, plan: Plan) -> Plan:
        """The leading rank's plan, on every rank."""
        if self._alone:
            return plan
        box = torch.tensor(plan.numbers(), dtype=torch.int64)
        torch.distributed.broadcast(box, src=torch.distributed.get_global_rank(self._group, 0), group=self._group)
        return plan if self.leader else Plan.of(box.tolist())


def dp_size_by_room() -> int:
    """How many data-parallel ranks requests are dealt out to by their bootstrap rooms; 1 also where the server has
    another rule (``--load-balance-method``)."""
    parallel = get_parallel()
    return int(parallel.num_dp_ranks) if parallel.load_balance_method == "follow_bootstrap_room" else 1


def first_of_all(parallel: Any) -> bool:
    """Whether this is the first rank of the first data-parallel one."""
    return not (parallel.attn_tp_rank or parallel.attn_dp_rank or parallel.dp_rank)
