"""The ranks of one scheduler: one decides, all act on it.

Tensor- and context-parallel ranks hear of a plan in their groups. Pipeline stages hear of it with the requests: SGLang
sends the list that ``ingest_requests`` has returned to the next stage once the batch is built, so that the plan for
this batch can stand at its end.
"""

from __future__ import annotations

from typing import Any

import torch
from laps_core.policy.types import Plan
from sglang.srt.runtime_context import get_parallel


class Ranks:
    """Ranks that share one list of waiting requests."""

    def __init__(self, cp_group: Any, tp_group: Any) -> None:
        """The groups on the CPU of this rank's context- and tensor-parallel peers."""
        parallel = get_parallel()
        self.leader: bool = not (parallel.attn_tp_rank or parallel.attn_cp_rank or parallel.pp_rank)
        self.saves = first_of_all(parallel)
        """True on the only rank that writes files."""
        self.stages: int = parallel.pp_size
        zigzag = parallel.enable_prefill_cp and parallel.cp_strategy == "zigzag"
        self.least = 2 * parallel.attn_cp_size if zigzag else 0
        """Context parallelism divides each request among the ranks, twice: one with fewer new tokens than this would
        have the whole step done by every rank."""
        self._later = parallel.pp_rank > 0
        # The first rank of the second group is the one that has heard in the first.
        sized = (cp_group, parallel.attn_cp_size), (tp_group, parallel.attn_tp_size)
        self._groups = [group for group, size in sized if size > 1]
        self._requests: list[Any] = []
        self._came: Plan | None = None

    def agree(self, plan: Plan) -> Plan:
        """The leading rank's plan, on every rank. Raises RuntimeError on a stage that none has come to."""
        if self._later:
            came, self._came = self._came, None
            if came is None:
                raise RuntimeError("LAPS: this stage has work to plan, the first one has none")
            return came
        if self._groups:
            box = torch.tensor(plan.numbers(), dtype=torch.int64)
            for group in self._groups:
                torch.distributed.broadcast(box, src=torch.distributed.get_global_rank(group, 0), group=group)
            plan = plan if self.leader else Plan.of(box.tolist())
        if self.stages > 1:
            self._requests.append(plan)
        return plan

    def ingested(self, requests: list[Any]) -> None:
        """Take in what this round has received: the very list that goes to the next stage."""
        if self.stages > 1:
            self._requests = requests

    def dispatched(self, requests: list[Any]) -> list[Any]:
        """Without a plan among them, which is kept. Raises RuntimeError where this stage has not used the last one."""
        if not self._later:
            return requests
        plans = [r for r in requests if isinstance(r, Plan)]
        if len(plans) + (self._came is not None) > 1:
            raise RuntimeError("LAPS: the first stage has planned a batch, this one had no work to plan")
        self._came = plans[0] if plans else self._came
        return [r for r in requests if not isinstance(r, Plan)]


def dp_size_by_room() -> int:
    """How many data-parallel ranks requests are dealt out to by their bootstrap rooms; 1 also where the server has
    another rule (``--load-balance-method``)."""
    parallel = get_parallel()
    return int(parallel.num_dp_ranks) if parallel.load_balance_method == "follow_bootstrap_room" else 1


def first_of_all(parallel: Any) -> bool:
    """Return True if this is the first rank of the first stage of the first data-parallel one."""
    return not any(
        (parallel.attn_tp_rank, parallel.attn_cp_rank, parallel.attn_dp_rank, parallel.dp_rank, parallel.pp_rank)
    )
