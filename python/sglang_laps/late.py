"""Decisions as late as the device stays busy, in the overlap loop of a prefill server.

SGLang decides on the next batch as soon as one is launched, so that what comes while that one runs has no part in it.
Put off until the batch is nearly done, it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_laps.core import LapsCore
from sglang_laps.ranks import Ranks

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

POLL_S = 0.5e-3
"""How often is looked whether the batch is done: its time is only predicted."""


class Late:
    """Puts off the decisions of one scheduler. ``Pacer.put_off`` says until when."""

    def __init__(self, scheduler: Scheduler, core: LapsCore, ranks: Ranks) -> None:
        self._scheduler, self._core, self._ranks = scheduler, core, ranks
        self._round_s = 0.0
        """When this round began to decide."""

    def wait(self, receive: Callable[[], list[Any]]) -> list[Any]:
        """While a batch runs: receive, look at what came, and wait until it is time to decide. Returns what was
        received. Call it on all ranks: those that follow wait for the leading one when they receive again."""
        sched, core = self._scheduler, self._core
        # SGLang's own polling looks all the time.
        polls = getattr(sched, "enable_continuous_input_polling", False)
        if not core.in_flight or core.under_way or sched._engine_paused or polls:
            return []
        received = receive()
        sched.waiting_queue.extend(sched.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        until_s = core.look(time.perf_counter(), sched.waiting_queue)
        if self._ranks.leader and not sched._engine_paused:
            done = getattr(sched.result_queue[0][1], "copy_done", None)
            while done is not None and (left_s := until_s - time.perf_counter()) > 0.0 and not done.query():
                time.sleep(min(left_s, POLL_S))
        return received

    def begins(self) -> None:
        """All that came by now has a part in the decision."""
        self._round_s = time.perf_counter()

    def launched(self) -> None:
        """A batch in one piece was launched: so long before the device is free the next one is to be decided."""
        self._core.pacer.sizes.launched(time.perf_counter() - self._round_s)
