"""When a decode step goes before prompts, on a server that prefills and decodes. Beyond the paper.

A token before its time is worth nothing: a step has a deadline and no weight. It runs as late as still meets the
deadline, given what would run before it; what is left goes to prompts by the other rules.

A batch that is not to be paused carries a row of each stream where that is less work than a step of its own: the
weights are read once for both. So the step that comes next anyhow is done early, at the price of its rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

from laps_core.length import LONG
from laps_core.policy.predict import Sizes
from laps_core.policy.types import Paused, Plan, Waiting

TIMES = 4.0
"""The derived target: so many times what a step takes alone. Steps then take a quarter of the device at most."""
LEAST_TARGET_S = 0.05
"""The derived target is no shorter."""
PROMPT_SHARE = 0.5
"""Share of the device that stays with prompts, whatever the target."""
OWED = PROMPT_SHARE / (1.0 - PROMPT_SHARE)
"""Seconds that prompts have for each second of decoding."""
REMEMBERED = 32
"""Steps whose time is remembered: they grow and shrink with the streams."""
WINDOW = 1024
"""Steps that the times between tokens are told of."""


class Decode:
    """Deadlines of the decode steps of one server. Times are seconds of one clock.

    Bound: while prompts wait, what streams have had is owed to prompts, OWED times; a step waits until nothing is, and
    rows run in no batch after which more would be owed than for a step. So of any time T, prompts have at least
    PROMPT_SHARE T - S, with S the longest step.
    """

    def __init__(self, target_ms: float | None) -> None:
        """`target_ms`: for the time between tokens; None = derived from what a step takes, 0 = no deadlines."""
        self._target_s = None if target_ms is None else target_ms / 1e3
        self.streams = 0
        """Requests that a step would serve."""
        self._context: int | None = None
        self.steps = self.steps_within = self.carried = 0
        """Steps so far; those of them in pauses of a prefill batch; those that were rows of one."""
        self.busy_s = 0.0
        """Device time of all but the last (seconds)."""
        self._since_s = self._ended_s = -math.inf
        self._owed_s = 0.0
        """Owed to prompts when the last step ended."""
        self._sent = 0
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._sorted: list[float] = []
        self._gaps: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    # -- what is known

    @property
    def step_s(self) -> float:
        """Median device time of the latest steps (seconds); 0 while none was measured."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0

    @property
    def target_s(self) -> float:
        """Target for the time between tokens; infinite = there is none."""
        if self._target_s is None:
            return max(LEAST_TARGET_S, TIMES * self.step_s)
        return self._target_s or math.inf

    def watch(self, now: float, streams: int, context: int | None = None) -> None:
        """So many requests are being decoded; call it before each decision. `context`: tokens of all their contexts;
        None = no prefill batch can have rows of them."""
        if not self.streams and streams:
            self._since_s = now
        self.streams, self._context = streams, context

    def room_s(self, now: float) -> float:
        """Time until the next step has to begin; infinite where none is due at all."""
        if not self.streams or self._sent:
            return math.inf
        return max(self._since_s, self._ended_s) + self.target_s - self.step_s - now

    def may(self, now: float) -> bool:
        """Return True if prompts have had their share since the last step."""
        return not self._sent and now >= self._ended_s + self._owed_s

    def rows_s(self, sizes: Sizes) -> float:
        """Predicted time that a row of each stream adds to a prefill batch (seconds); infinite if unknown, or if no
        batch can have them."""
        known = sizes.model.coefficients
        if known is None or self._context is None or not self.streams:
            return math.inf
        return self.streams * known.work_s(1, self._context // self.streams)

    def _carries(self, now: float, batch_s: float, tokens: int, most: int, sizes: Sizes) -> bool:
        """Return True if rows run in a batch of `tokens` that takes `batch_s` without them. `most`: tokens that a
        batch may have here."""
        rows_s = self.rows_s(sizes)
        # A step that is on the device has ended when this batch begins.
        owed_s = OWED * self.step_s if self._sent else max(0.0, self._ended_s + self._owed_s - now)
        fair = owed_s + OWED * rows_s - batch_s <= OWED * self.step_s
        return rows_s < self.step_s and fair and tokens + self.streams <= most

    # -- one decision

    def turn(
        self,
        now: float,
        plan: Plan,
        shorts: Sequence[Waiting],
        longs: Sequence[Waiting],
        paused: Paused | None,
        sizes: Sizes,
    ) -> Plan:
        """The plan; or a decode step first, where one would be late after it; or a part of its short batch. A batch in
        one piece carries rows of the streams where that pays, and ends before their tokens are late.

        `shorts`, `longs`: what the plan picks from.
        """
        if not self.streams or not (plan.order or paused):
            return plan
        slice_s = 0.0 if paused is None else paused.slice_s
        room_s, step = self.room_s(now) - slice_s, plan._replace(order=(), picked=(), longs=(), decode=True)
        # With rows it may last as long as the step that it saves, too.
        ends_s = room_s + max(0.0, self.step_s - self.rows_s(sizes))
        most = sizes.budget if paused is None else sizes.preempting_budget(plan.threshold)
        may = self.may(now)
        picked = [shorts[i] for i in plan.picked]
        if not plan.order or plan.order[0] == LONG or not picked:
            first_s = _until_pause_s(plan, picked, longs, sizes) if plan.order else 0.0
            if plan.order and plan.longs and not plan.layers and (first_s <= ends_s or not may):
                plan = plan._replace(carries=self._carries(now, first_s, plan.tokens, most, sizes))
            return step if may and room_s < first_s and not plan.carries else plan

        def carries(count: int) -> bool:
            batch = picked[:count]
            return self._carries(now, _seconds(batch, sizes), sum(w.tokens for w in batch), most, sizes)

        fit = _fitting(picked, ends_s, sizes)
        if not fit or not carries(fit):
            fit = _fitting(picked, room_s, sizes)
            if not fit and may:
                return step
            # After a step there is no more time than this. The first request runs in any case.
            fit = fit or max(1, _fitting(picked, self.target_s - self.step_s - slice_s, sizes))
        split = plan.split or fit < len(picked)
        return plan._replace(picked=plan.picked[:fit], split=split, carries=carries(fit))

    # -- steps

    def sent(self) -> None:
        """A step goes to the device."""
        self._sent += 1

    def ran(self, begin: float, end: float, *, streams: int, within: bool, rows_s: float | None = None) -> None:
        """Count a step that had the device from `begin` to `end`, for so many `streams`. `within`: in a pause.
        `rows_s`: it was rows of a prefill batch, predicted to have taken so much of the time; None = a step of its own.
        """
        self._sent = max(0, self._sent - 1)
        took_s = max(0.0, end - begin)
        owed_s = max(0.0, self._ended_s + self._owed_s - begin)
        last_s = max(self._since_s, self._ended_s)
        if math.isfinite(last_s) and end > last_s:
            self._gaps.append((end - last_s, streams))
        self._ended_s = max(self._ended_s, end)
        self.steps += 1
        self.steps_within += within
        if rows_s is not None:
            rows_s = min(rows_s, took_s)
            self._owed_s = max(0.0, owed_s + OWED * rows_s - (took_s - rows_s))
            self.carried += 1
            return
        self._owed_s = OWED * took_s
        if len(self._took) == REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._took[0])]
        self._took.append(took_s)
        insort(self._sorted, took_s)
        self.busy_s += took_s

    def gap_s(self, share: float) -> float | None:
        """Quantile of the latest times between tokens, each counted once for each stream; None if there are none."""
        gaps = sorted(self._gaps)
        left = share * sum(n for _, n in gaps)
        for gap, n in gaps:
            left -= n
            if left <= 0:
                return gap
        return None

    def status(self) -> dict[str, Any]:
        """Return the entry on decode steps in /laps_status (JSON-ready)."""
        target_s, tbt = self.target_s, {"p50": 0.5, "p99": 0.99, "longest": 1.0}
        ms = {name: self.gap_s(share) for name, share in tbt.items()}
        return {
            "target_ms": None if math.isinf(target_s) else 1e3 * target_s,
            "step_ms": 1e3 * self.step_s if self._took else None,
            "streams": self.streams,
            "steps": self.steps,
            "steps_in_pauses": self.steps_within,
            "steps_carried": self.carried,
            "busy_s": self.busy_s,
            "tbt_ms": {name: None if s is None else 1e3 * s for name, s in ms.items()},
        }


def _until_pause_s(plan: Plan, joining: Sequence[Waiting], longs: Sequence[Waiting], sizes: Sizes) -> float:
    """Predicted time of a batch that is about to start, to its first pause or its end; 0 = unknown."""
    left, shape = plan.tokens or sizes.budget, [(w.tokens, w.history) for w in joining if plan.mixed]
    left -= sum(new for new, _ in shape)
    for w in (longs[i] for i in plan.longs):
        shape.append((min(w.tokens, max(0, left)), w.history))
        left -= shape[-1][0]
    took_s = sizes.model.predict(shape) or 0.0
    return took_s * plan.layers / (sizes.layers * plan.parts) if plan.layers and sizes.layers else took_s


def _fitting(picked: Sequence[Waiting], room_s: float, sizes: Sizes) -> int:
    """How many of these, in order, are predicted to run in this time; all where that is unknown."""

    return bisect_left(range(1, len(picked) + 1), True, key=lambda n: _seconds(picked[:n], sizes) > room_s)


def _seconds(batch: Sequence[Waiting], sizes: Sizes) -> float:
    """Predicted time of a batch of these; 0 = unknown."""
    return sizes.model.predict([(w.tokens, w.history) for w in batch]) or 0.0
