"""Batches that run in a pause of long work, and steps that both classes share (``exchange``). Beyond the paper."""

from __future__ import annotations

from collections.abc import Sequence

from laps_core.policy.batching import LongBatches, oldest_of, pack
from laps_core.policy.exchange import AHEAD, gain
from laps_core.policy.fairness import Gap
from laps_core.policy.order import service_order
from laps_core.policy.predict import Sizes
from laps_core.policy.types import Paused, Plan, Waiting

DEPTH = 2
"""Most long batches under way at once: the running batch, and a batch that the running batch has overtaken."""


class Preemption:
    """Comparison of waiting requests with each other and with the paused batch. Times are seconds of one clock.

    `all_waiting` in all methods: all waiting requests.
    """

    def __init__(self, sizes: Sizes, gap: Gap, longs: LongBatches) -> None:
        self._sizes, self._gap, self._longs = sizes, gap, longs

    def would_miss_deadline(self, now: float, picked: Sequence[Waiting], later_s: float) -> bool:
        """Return True if the batch can meet a deadline now that it would miss if it ran `later_s` later."""
        deadlines = [w.deadline_s for w in picked if w.deadline_s is not None]
        if not deadlines:
            return False
        done_s = now + self._sizes.batch_s(picked)
        return any(done_s <= d < done_s + later_s for d in deadlines)

    def should_preempt(
        self, now: float, picked: Sequence[Waiting], paused: Paused, all_waiting: Sequence[Waiting]
    ) -> bool:
        """Return True if the picked requests should run in this pause. If waiting would make only one of the two
        (picked requests, paused batch) miss a deadline, that one goes first. Otherwise the exchange must pay."""
        fixed_s = self._sizes.fixed_s or 0.0
        took_s = self._sizes.batch_s(picked) or fixed_s
        ends_at, due_s = now + paused.left_s, paused.due_s(now)
        missed = self.would_miss_deadline(now, picked, paused.left_s)
        if missed != (due_s is not None and ends_at <= due_s < ends_at + took_s):
            return missed
        mine, others = self._sizes.weights(picked, all_waiting)
        return gain(-fixed_s, others, (mine, paused.left_s), (paused.weight, -took_s)) >= 0.0

    def share(
        self,
        now: float,
        picked: Sequence[Waiting],
        longs: Sequence[Waiting],
        plan: Plan,
        all_waiting: Sequence[Waiting],
        *,
        starts_at: float,
        behind: bool = False,
    ) -> Plan:
        """Return the plan, with the short batch in the step of the long batch if it fits there, sharing pays, and no
        prompt becomes late by it. `starts_at`: start of the step on the device. `behind`: the short batch cannot run
        before the long batch, so sharing always pays."""
        sizes, joining = self._sizes, self._sizes.joining(picked)
        batch = [longs[i] for i in plan.long.picked]
        if sum(w.tokens for w in batch) + joining > sizes.budget:
            return plan
        alone_s = now + sum(map(sizes.beside_s, batch))
        later_s = 0.0 if behind else max(0.0, alone_s - max(now, self._gap.opens_at(now)))
        saved_s = sizes.fixed_s or 0.0
        mine, others = sizes.weights(picked, all_waiting)
        # Later arrivals gain from the saved step, too: in a closed loop, the next requests of the same clients.
        gained = gain(saved_s, others, (mine, (AHEAD - 1.0) * saved_s - later_s))
        if gained < 0.0 or self.would_miss_deadline(starts_at, picked, later_s):
            return plan
        if self.would_miss_deadline(starts_at, batch, sizes.batch_s([*batch, *picked]) - sizes.batch_s(batch)):
            return plan
        return self._longs.cut(plan, longs, plan.long.picked, sizes.budget, joining)._replace(mixed=True)

    def add_overtaking(
        self, now: float, longs: Sequence[Waiting], paused: Paused, budget: int, plan: Plan,
        all_waiting: Sequence[Waiting], *, moved_s: float,
    ) -> Plan:  # fmt: skip
        """Return the plan, with a batch of whole long prompts that preempts the paused batch if that pays. `budget`:
        tokens. `moved_s`: device time of the paused batch since it was last overtaken. The paused batch is
        overtaken again only after a gap, or after a step's fixed time if a deadline would be missed."""
        sizes = self._sizes
        if sizes.fixed_s is None or paused.depth >= DEPTH or moved_s < sizes.fixed_s:
            return plan
        turns = service_order(self._longs.order, longs, sizes, now, paused)
        turns = [i for i in turns if not longs[i].started and longs[i].tokens <= budget]
        batch = [longs[i] for i in turns]
        pressed = self.would_miss_deadline(now, batch[:1], paused.left_s)
        if not pressed and moved_s < self._gap.least_s:
            return plan
        picked = pack(batch, sizes, budget=budget, waiting=len(longs), now=now)
        if not picked or not self.should_preempt(now, [batch[i] for i in picked], paused, all_waiting):
            return plan
        late = self._longs.is_late(longs[oldest_of(longs)], now)
        plan = plan._replace(account=plan.account._replace(oldest_late=late))
        return self._longs.cut(plan, longs, [turns[i] for i in picked], budget)
