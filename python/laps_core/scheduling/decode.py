"""When a decode step goes before prompts, on a server that prefills and decodes. Beyond the paper.

A token before its time is worth nothing: a step has a deadline and no weight. It runs as late as still meets the
deadline, given what would run before it; what is left goes to prompts by the other rules.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

from laps_core.length import LONG
from laps_core.scheduling.plan import Paused, Plan, Waiting
from laps_core.scheduling.sizes import Sizes

TIMES = 4.0
"""The derived target: so many times what a step takes alone. Steps then take a quarter of the device at most."""
LEAST_TARGET_S = 0.05
"""The derived target is no shorter."""
PROMPT_SHARE = 0.5
"""Share of the device that stays with prompts, whatever the target."""
REMEMBERED = 32
"""Steps whose time is remembered: they grow and shrink with the streams."""
WINDOW = 1024
"""Steps that the times between tokens are told of."""


class Decode:
    """Deadlines of the decode steps of one server. Times are seconds of one clock.

    Bound: while prompts wait, two steps are at least ``PROMPT_SHARE / (1 - PROMPT_SHARE)`` times as far apart as the
    first of them took. So of any time T, prompts have at least PROMPT_SHARE T - S, with S the longest step.
    """

    def __init__(self, target_ms: float | None) -> None:
        """`target_ms`: for the time between tokens; None = derived from what a step takes, 0 = no deadlines."""
        self._target_s = None if target_ms is None else target_ms / 1e3
        self.streams = 0
        """Requests that a step would serve."""
        self.steps = self.steps_within = 0
        """Steps so far, and those of them in pauses of a prefill batch."""
        self.busy_s = 0.0
        """Device time of all of them (seconds)."""
        self._since_s = self._ended_s = -math.inf
        self._last_s = 0.0
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

    def watch(self, now: float, streams: int) -> None:
        """So many requests are being decoded; call it before each decision."""
        if not self.streams and streams:
            self._since_s = now
        self.streams = streams

    def room_s(self, now: float) -> float:
        """Time until the next step has to begin; infinite where none is due at all."""
        if not self.streams or self._sent:
            return math.inf
        return max(self._since_s, self._ended_s) + self.target_s - self.step_s - now

    def may(self, now: float) -> bool:
        """Whether prompts have had their share since the last step."""
        return not self._sent and now >= self._ended_s + self._last_s * PROMPT_SHARE / (1.0 - PROMPT_SHARE)

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
        """The plan; or a decode step first, where one would be late after it; or a part of its short batch.

        `shorts`, `longs`: what the plan picks from.
        """
        slice_s = 0.0 if paused is None else paused.slice_s
        room_s, step = self.room_s(now) - slice_s, plan._replace(order=(), picked=(), longs=(), decode=True)
        if math.isinf(room_s) or not (plan.order or paused):
            return plan
        may = self.may(now)
        picked = [shorts[i] for i in plan.picked]
        if not plan.order or plan.order[0] == LONG or not picked:
            first_s = _until_pause_s(plan, picked, longs, sizes) if plan.order else 0.0
            return step if may and room_s < first_s else plan
        fit = _fitting(picked, room_s, sizes)
        if not fit and may:
            return step
        # After a step there is no more time than this. The first request runs in any case.
        fit = fit or max(1, _fitting(picked, self.target_s - self.step_s - slice_s, sizes))
        return plan if fit == len(picked) else plan._replace(picked=plan.picked[:fit], split=True)

    # -- steps

    def sent(self) -> None:
        """A step goes to the device."""
        self._sent += 1

    def ran(self, begin: float, end: float, *, streams: int, within: bool) -> None:
        """It had the device from `begin` to `end`, for so many `streams`. `within`: in a pause."""
        self._sent = max(0, self._sent - 1)
        took_s = max(0.0, end - begin)
        last_s = max(self._since_s, self._ended_s)
        if math.isfinite(last_s) and end > last_s:
            self._gaps.append((end - last_s, streams))
        if len(self._took) == REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._took[0])]
        self._took.append(took_s)
        insort(self._sorted, took_s)
        self._ended_s, self._last_s = max(self._ended_s, end), took_s
        self.steps += 1
        self.steps_within += within
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
        """What /laps_status says of decode steps (JSON-ready)."""
        target_s, tbt = self.target_s, {"p50": 0.5, "p99": 0.99, "longest": 1.0}
        ms = {name: self.gap_s(share) for name, share in tbt.items()}
        return {
            "target_ms": None if math.isinf(target_s) else 1e3 * target_s,
            "step_ms": 1e3 * self.step_s if self._took else None,
            "streams": self.streams,
            "steps": self.steps,
            "steps_in_pauses": self.steps_within,
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

    def took_s(count: int) -> float:
        return sizes.model.predict([(w.tokens, w.history) for w in picked[:count]]) or 0.0

    return bisect_left(range(1, len(picked) + 1), True, key=lambda n: took_s(n) > room_s)
