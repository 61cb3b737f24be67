"""Timing of decode steps on a server that prefills and decodes. Beyond the paper.

A token that comes early is worth nothing, so a decode step has a deadline and no weight. The step runs as late as its
deadline allows, given the work that would run before it. All other time goes to prompts, by the other rules.

A prefill batch that ends before the next step is due carries a row of each stream if that is less work than a separate
step: the weights are read once for both. So the next step runs early, at the price of its rows. A short batch runs in
a pause of such a batch if the rows' tokens still come in time. A step that is due takes along short requests that may
not preempt yet, as many as at most double its time: this saves a step. If all requests have deadlines, or if short
requests are few, a step for both classes carries the rows (``together``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

from laps_core.length import LONG, SHORT
from laps_core.policy.predict import Sizes, without_standstill
from laps_core.policy.together import instead_of_slices, together, until_pause_s, whole_s
from laps_core.policy.types import DecodeStep, DecodeTurn, LongBatch, Paused, Plan, Waiting
from laps_core.statistics import DecodeSteps

TIMES = 4.0
"""Derived target, in multiples of the time of a step. Decode steps then take at most a quarter of the device."""
LEAST_TARGET_S = 0.05
"""Shortest derived target (seconds)."""
PROMPT_SHARE = 0.5
"""Share of the device that stays with prompts, whatever the target (0..1)."""
OWED = PROMPT_SHARE / (1.0 - PROMPT_SHARE)
"""Seconds owed to prompts for each second of decoding."""
REMEMBERED = 32
"""Latest decode steps whose time is remembered: step times change with the number of streams."""


class Decode:
    """Deadlines of the decode steps of one server. Times are seconds of one clock.

    Bound: while prompts wait, they are owed OWED times the time that streams have had. A step waits until nothing is
    owed. No batch carries rows if more would be owed after it than after a separate step. So of any time T, prompts
    have at least PROMPT_SHARE T - S, with S the longest step. Standstills of the host do not count.
    """

    def __init__(self, target_ms: float | None) -> None:
        """`target_ms`: target for the time between tokens; None: derived from the time of a step; 0: no deadlines."""
        self._target_s = None if target_ms is None else target_ms / 1e3
        self.streams = 0
        """Number of requests that a decode step serves."""
        self.step_s = 0.0
        """Median device time of the latest steps (seconds); 0 until a step was measured."""
        self.statistics = DecodeSteps()
        self._context: int | None = None
        self._since_s = self._ended_s = -math.inf
        self._owed_s = 0.0
        """Time owed to prompts when the last step ended (seconds)."""
        self._sent = 0
        self._launched_s: float | None = None
        """Time at which the last step was launched; None if a prefill batch carries it."""
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    # -- state

    @property
    def target_s(self) -> float:
        """Target for the time between tokens (seconds); infinite without deadlines."""
        if self._target_s is None:
            return max(LEAST_TARGET_S, TIMES * self.step_s)
        return self._target_s or math.inf

    def set_streams(self, now: float, streams: int, context: int | None = None) -> None:
        """Set the number of requests in decoding; call before each decision. `context`: tokens of all their contexts;
        None: no prefill batch can carry rows of these streams."""
        if not self.streams and streams:
            self._since_s = now
        self.streams, self._context = streams, context

    @property
    def _due_s(self) -> float:
        return max(self._since_s, self._ended_s) + self.target_s

    def time_to_next_step_s(self, now: float) -> float:
        """Return the time until the next step must start; infinite without streams or while a step is in flight."""
        if not self.streams or self._sent:
            return math.inf
        return self._due_s - self.step_s - now

    def may_step(self, now: float) -> bool:
        """Return True if a step may run: the last step has ended, and prompts have had their share since."""
        return not self._sent and not self.owed_s(now)

    def owed_s(self, now: float) -> float:
        """Return the time that prompts must have before the next step."""
        return max(0.0, self._ended_s + self._owed_s - now)

    def rows_s(self, sizes: Sizes) -> float:
        """Return the predicted time that a row of each stream adds to a prefill batch (seconds); infinite if unknown,
        or if no batch can carry rows.

        The result is at least the time of a step beyond reading the weights. A step reads long contexts for each
        stream; the latency model learned from prompts, which read a context once for many tokens.
        """
        known = sizes.model.coefficients
        if known is None or self._context is None or not self.streams:
            return math.inf
        return max(self.streams * known.work_s(1, self._context // self.streams), self.step_s - known.step_s)

    # -- one decision

    def adjust_plan(
        self,
        now: float,
        plan: Plan,
        shorts: Sequence[Waiting],
        longs: Sequence[Waiting],
        paused: Paused | None,
        sizes: Sizes,
        *,
        apart: bool = False,
        per_s: float = math.inf,
    ) -> Plan:
        """Return the plan, changed so that the next decode step is in time if prompts have had their share.

        If the step would be late after the plan, the step goes first, with some of the plan's short requests, or only a
        part of the short batch runs. A batch without pauses carries rows of the streams if that pays and ends in time.
        `shorts`, `longs`: the requests that the plan picks from. `apart`: the two classes must not share a step.
        `per_s`: rate of arrivals of short requests.
        """
        if not self.streams or not (plan.order or paused):
            return plan
        if paused is not None and paused.rows:
            return self._adjust_beside_rows(now, plan, shorts, paused, sizes)
        slice_s = 0.0 if paused is None else paused.slice_s
        time_left_s, rows_s, may_step = self.time_to_next_step_s(now) - slice_s, self.rows_s(sizes), self.may_step(now)
        # A batch with rows may also take the time of the step that it saves.
        limit_s = time_left_s + max(0.0, self.step_s - rows_s)
        # A step that is on the device now will have ended when this batch starts.
        owed_s = OWED * self.step_s if self._sent else self.owed_s(now)
        most = sizes.budget if paused is None else sizes.preempting_budget(plan.threshold)
        step = plan._replace(order=(), picked=(), long=LongBatch(), decode="first")
        picked = [shorts[i] for i in plan.picked]

        def carries(batch_s: float, tokens: int) -> DecodeTurn:
            fair = owed_s + OWED * rows_s - batch_s <= OWED * self.step_s
            return "carried" if rows_s < self.step_s and fair and tokens + self.streams <= most else ""

        if paused is None and not apart and rows_s < self.step_s:
            within_s = min(limit_s, self.target_s - rows_s)
            joint = together(now, plan, shorts, longs, sizes, within_s=within_s, rows=self.streams)
            if joint is None and plan.long.layers and plan.order[:1] == (LONG,):
                share = min(self.step_s / self.target_s, 1.0 - PROMPT_SHARE)
                joint = instead_of_slices(
                    now, plan, shorts, longs, sizes,
                    within_s=within_s, rows=self.streams, rows_s=rows_s, share=share, per_s=per_s,
                )  # fmt: skip
            if joint and carries(whole_s(joint, picked, longs, sizes), joint.long.tokens):
                return joint._replace(decode="carried")

        def fitting(within_s: float) -> int:
            return _count_fitting(picked, within_s, sizes)

        def count_carries(count: int) -> DecodeTurn:
            return carries(sizes.batch_s(picked[:count]), sum(w.tokens for w in picked[:count]))

        if plan.order[:1] != (SHORT,) or not picked:
            first_s = until_pause_s(plan, picked, longs, sizes) if plan.order else 0.0
            if plan.long.picked and not plan.long.layers and (first_s <= limit_s or not may_step):
                plan = plan._replace(decode=carries(first_s, plan.long.tokens))
            if plan.decode or not may_step:
                return plan
            if picked and rows_s < self.step_s:
                # Last moment at which short requests can join without making the step's tokens late.
                along = fitting(min(2.0 * self.step_s, time_left_s + slice_s + self.step_s) - rows_s)
                longer_s = max(0.0, sizes.batch_s(picked[:along]) + rows_s - self.step_s)
                if along and time_left_s < first_s + longer_s and (decode := count_carries(along)):
                    # This batch adds no step, so the gap does not count a preemption.
                    account = plan.account._replace(contended=False)
                    return step._replace(
                        order=(SHORT,), picked=plan.picked[:along], split=True, decode=decode, account=account
                    )
            return step if time_left_s < first_s else plan

        fit = fitting(limit_s)
        if not fit or not count_carries(fit):
            fit = fitting(time_left_s)
            if not fit and may_step:
                return step
            # Even after a step there is no more time than this. The first request runs in any case.
            fit = fit or max(1, fitting(self.target_s - self.step_s - slice_s))
        return plan._replace(picked=plan.picked[:fit], split=plan.split or fit < len(picked), decode=count_carries(fit))

    def _adjust_beside_rows(
        self, now: float, plan: Plan, shorts: Sequence[Waiting], paused: Paused, sizes: Sizes
    ) -> Plan:
        """Return the plan for a pause of a batch with rows: as much of the short batch as runs without making the
        tokens of the rows late; otherwise the paused batch continues."""
        left_s = self._due_s - now - paused.slice_s - paused.left_s
        picked = [shorts[i] for i in plan.picked] if plan.order[:1] == (SHORT,) else []
        fit = _count_fitting(picked, left_s, sizes)
        if not fit:
            return plan._replace(order=(), picked=())
        return plan._replace(picked=plan.picked[:fit], split=fit < len(picked))

    # -- steps

    @property
    def running(self) -> DecodeStep | None:
        """Return the separate step on the device, if any."""
        return DecodeStep(self._launched_s, self.step_s) if self._sent and self._launched_s is not None else None

    def record_launch(self, now: float | None = None) -> None:
        """Record that a step goes to the device at `now`; None: a prefill batch carries it."""
        self._sent += 1
        self._launched_s = now

    def record_step(self, begin: float, end: float, *, streams: int, within: bool, rows_s: float | None = None) -> None:
        """Count a step of `streams` requests on the device from `begin` to `end`. `within`: the step ran in a pause.
        `rows_s`: predicted time of the step as rows of a prefill batch; None: a separate step.
        """
        self._sent = max(0, self._sent - 1)
        took_s = max(0.0, end - begin)
        owed_s = self.owed_s(begin)
        since_s = max(self._since_s, self._ended_s)
        self._ended_s = max(self._ended_s, end)
        self.statistics.record_step(end - since_s, streams, within=within, own_s=took_s if rows_s is None else None)
        if rows_s is not None:
            rows_s = min(rows_s, took_s)
            self._owed_s = max(0.0, owed_s + OWED * rows_s - (took_s - rows_s))
            return
        self._took.append(took_s)
        self.step_s = sorted(self._took)[len(self._took) // 2]
        # For a standstill of the host nothing is owed: otherwise all streams would pause as long again.
        self._owed_s = OWED * without_standstill(took_s, self.step_s)

    def status(self) -> dict[str, Any]:
        """Return the entry on decode steps in /laps_status (JSON-ready)."""
        return {
            "target_ms": None if math.isinf(self.target_s) else 1e3 * self.target_s,
            "step_ms": 1e3 * self.step_s if self._took else None,
            "streams": self.streams,
            **self.statistics.status(),
        }


def _count_fitting(items: Sequence[Waiting], within_s: float, sizes: Sizes) -> int:
    """Count the requests, in order, that are predicted to run in this time as one batch; all if unknown."""
    return bisect_left(range(1, len(items) + 1), True, key=lambda n: sizes.batch_s(items[:n]) > within_s)
