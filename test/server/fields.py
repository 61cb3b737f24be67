"""Scheduler with only the fields that LAPS touches, for tests without a server."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import cores
from cores import Request

from .adders import FcfsPolicy, Grammars, LoadInquirer, SingleRank, make_builder


class SchedulerFields:
    """Fields of the stock scheduler that LAPS touches, with LAPS on top."""

    enable_staging = False
    enable_overlap = False
    chunked_prefill_size = 512
    max_total_num_tokens = 4096

    def __init__(
        self,
        queue: list[Request],
        held: Request | None = None,
        parked: Sequence[Request] = (),
        stock: Any = lambda _: None,
        loads: Any = None,
    ) -> None:
        self.waiting_queue, self.chunked_req = queue, held
        self.load_inquirer: Any = loads or LoadInquirer()
        self.grammar_manager = Grammars()
        self.policy = FcfsPolicy()
        self._pending_chunked_abort_req: Any = None
        core = cores.make_core(parked)
        pauses = SimpleNamespace(in_flight=list, adapters=set)
        self.laps: Any = SimpleNamespace(
            core=core, builder=make_builder(self, core, stock), pauses=pauses, ranks=SingleRank()
        )

    @property
    def in_progress(self) -> list[Any]:
        """Return the prompts that are between two chunks."""
        found: list[Any] = self.laps.core.view_queues([], self.chunked_req).begun
        return found
