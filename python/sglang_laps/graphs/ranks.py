"""One decision for all tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch


class Ranks:
    """The ranks that must run the same cell. Decisions travel over the CPU group, so the device is never waited for."""

    def __init__(self, group: Any) -> None:
        """``group``: SGLang's tensor-parallel group coordinator."""
        self._group = group
        self.size: int = group.world_size
        self.first: bool = group.rank_in_group == 0

    def agree(self, value: int) -> int:
        """The first rank's value."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64)
        torch.distributed.broadcast(shared, src=self._group.ranks[0], group=self._group.cpu_group)
        return int(shared.item())

    def all(self, ok: bool) -> bool:
        """Whether it is true on every rank."""
        if self.size == 1:
            return ok
        shared = torch.tensor([int(ok)], dtype=torch.int64)
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return bool(shared.item())
