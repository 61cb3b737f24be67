"""Late decisions in the overlap loop: as late as possible while the device stays busy.

SGLang decides on the next batch as soon as a batch is launched, so requests that arrive while that batch runs cannot
join the next one. LAPS puts the decision off until the running batch or decode step is nearly done, so that such
requests can join, or run before the next decode step.
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
"""Interval of checks whether the batch is done (seconds), because its time is only predicted."""


class Late:
    """Delay of one scheduler's decisions, until the time that ``Pacer.decision_time_s`` returns."""

    def __init__(self, scheduler: Scheduler, core: LapsCore, ranks: Ranks) -> None:
        self._scheduler, self._core, self._ranks = scheduler, core, ranks
        self._round_s = 0.0
        """Time when the decision of this round started."""

    def wait(self, receive: Callable[[], list[Any]]) -> list[Any]:
        """If a batch or a decode step runs, receive requests, look at them, and wait until it is time to decide. Return
        the requests. Call this on all ranks: the other ranks wait for the leading rank when they receive again."""
        sched, core = self._scheduler, self._core
        # With this option SGLang itself polls for input all the time.
        polls = getattr(sched, "enable_continuous_input_polling", False)
        if not (core.in_flight or core.step) or core.under_way or sched._engine_paused or polls:
            return []
        received = receive()
        if core.decode is None:
            sched.waiting_queue.extend(sched.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        until_s = core.look(time.perf_counter(), sched.waiting_queue)
        # A pause of the server, received just now together with its end, has taken the result out of the queue.
        if self._ranks.leader and sched.result_queue and not sched._engine_paused:
            done = getattr(sched.result_queue[0][1], "copy_done", None)
            while done is not None and (left_s := until_s - time.perf_counter()) > 0.0 and not done.query():
                time.sleep(min(left_s, POLL_S))
        return received

    def record_start(self) -> None:
        """Record the start of a decision, which includes all requests that have arrived by now."""
        self._round_s = time.perf_counter()

    def record_launch(self) -> None:
        """Record how long deciding on and launching a whole batch took: the next decision starts that much earlier."""
        self._core.pacer.sizes.record_launch_time(time.perf_counter() - self._round_s)
