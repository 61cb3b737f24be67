"""The ranks of one scheduler: the leading rank decides, all ranks act on its plan.

Tensor- and context-parallel ranks receive the plan in their groups. Pipeline stages receive it with the requests:
SGLang sends the list that ``ingest_requests`` returned to the next stage once the batch is built, so the plan for this
batch can be appended to that list.
"""

from __future__ import annotations

from typing import Any

import torch
from laps_core.policy.types import Plan
from sglang.srt.runtime_context import get_parallel


class Ranks:
    """Ranks that share one list of waiting requests."""

    def __init__(self, cp_group: Any, tp_group: Any) -> None:
        """`cp_group`, `tp_group`: CPU groups of this rank's context- and tensor-parallel peers."""
        parallel = get_parallel()
        self.leader: bool = not (parallel.attn_tp_rank or parallel.attn_cp_rank or parallel.pp_rank)
        self.saves = first_of_all(parallel)
        """True on the only rank that writes files."""
        self.stages: int = parallel.pp_size
        zigzag = parallel.enable_prefill_cp and parallel.cp_strategy == "zigzag"
        self.min_divisible_tokens = 2 * parallel.attn_cp_size if zigzag else 0
        """Least new tokens of a request that zigzag context parallelism can divide, two parts for each rank; 0 without
        it. With a smaller request, every rank would do the whole step."""
        self._later = parallel.pp_rank > 0
        # The first rank of the second group has received the plan in the first group.
        sized = (cp_group, parallel.attn_cp_size), (tp_group, parallel.attn_tp_size)
        self._groups = [group for group, size in sized if size > 1]
        self._requests: list[Any] = []
        self._kept_plan: Plan | None = None

    def agree(self, plan: Plan) -> Plan:
        """Return the leading rank's plan, on every rank. Raises RuntimeError on a later stage that received no plan."""
        if self._later:
            came, self._kept_plan = self._kept_plan, None
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

    def keep_received(self, requests: list[Any]) -> None:
        """Keep the list of requests that this round received: the same list object that goes to the next stage."""
        if self.stages > 1:
            self._requests = requests

    def take_plan(self, requests: list[Any]) -> list[Any]:
        """Return `requests` without the plan, which is kept. Raises RuntimeError if the last plan was not used."""
        if not self._later:
            return requests
        plans = [r for r in requests if isinstance(r, Plan)]
        if len(plans) + (self._kept_plan is not None) > 1:
            raise RuntimeError("LAPS: the first stage has planned a batch, this one had no work to plan")
        self._kept_plan = plans[0] if plans else self._kept_plan
        return [r for r in requests if not isinstance(r, Plan)]


def dp_size_by_room() -> int:
    """Return the number of data-parallel ranks that bootstrap rooms address; 1 also if the server has another rule
    (``--load-balance-method``)."""
    parallel = get_parallel()
    return int(parallel.num_dp_ranks) if parallel.load_balance_method == "follow_bootstrap_room" else 1


def first_of_all(parallel: Any) -> bool:
    """Return True if this is the first rank of the first stage of the first data-parallel rank."""
    return not any(
        (parallel.attn_tp_rank, parallel.attn_cp_rank, parallel.attn_dp_rank, parallel.dp_rank, parallel.pp_rank)
    )
