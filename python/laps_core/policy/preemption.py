"""Batches that run in a pause of long work, and steps that classes share. Beyond the paper.

A decision is an exchange: those who go first gain the time that they would have waited, those in the paused batch lose
the time of the new one, all others who wait lose a step's fixed time. Where few wait, or where long prompts are so long
that it is nothing to them, short requests are served at once. Where many wait and most steps are fixed time (a mixture
of experts), batches that share a step serve all of them sooner.

Short requests are weighed against long ones by one over the time that each takes alone: the sum is one of slowdowns.
Orders by deadlines say themselves who goes before what is paused (FlowPrefill).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laps_core.policy.batching import LongBatches, ends_s, pack, step_costs
from laps_core.policy.fairness import PATIENCE, Gap
from laps_core.policy.order import line
from laps_core.policy.predict import Sizes
from laps_core.policy.types import Paused, Plan, Waiting

OVERTAKE_DEPTH = 2
"""Batches of long work under way at once: one that runs, and one that it has overtaken."""


def overtake(
    items: Sequence[Waiting],
    beside_s: Callable[[Waiting], float],
    *,
    budget: int,
    left_s: float,
    running: int,
    fixed_s: float,
    waiting: int,
) -> list[int]:
    """Indices of prompts so small that preempting the running batch for them pays, by the sum of waits.

    items: prompts not in progress, smallest first; those picked run whole. left_s: what the running batch still needs.
    running: requests in it. Those picked gain `left_s` each; the running ones lose the new batch's time, all others a
    step's fixed time.
    """
    best, gain = 0, 0.0
    tokens, seconds = 0, fixed_s
    for n, item in enumerate(items, 1):
        tokens += item.tokens
        seconds += beside_s(item)
        if item.started or tokens > budget or seconds > left_s:
            break
        now = n * left_s - running * seconds - step_costs(fixed_s, max(0, waiting - n))
        if now > gain:
            best, gain = n, now
    return list(range(best))


class Preemption:
    """Weighs those who wait against each other, and against what is paused. Times are seconds of one clock."""

    def __init__(self, sizes: Sizes, gap: Gap, longs: LongBatches) -> None:
        self._sizes, self._gap, self._longs = sizes, gap, longs

    def misses(self, now: float, picked: Sequence[Waiting], later_s: float) -> bool:
        """Return True if a deadline that can be met now would be missed if the batch ran `later_s` later."""
        deadlines = [w.deadline_s for w in picked if w.deadline_s is not None]
        if not deadlines:
            return False
        done_s = now + self._sizes.batch_s(picked)
        return any(done_s <= d < done_s + later_s for d in deadlines)

    def pays(self, now: float, shorts: Sequence[Waiting], longs: Sequence[Waiting], plan: Plan, paused: Paused) -> bool:
        """Return True if the short batch runs in this pause. It does in any case after PATIENCE gaps, and where a
        deadline would be missed."""
        sizes, picked = self._sizes, [shorts[i] for i in plan.picked]
        waited_s = now - min(w.since_s for w in picked)
        if waited_s >= PATIENCE * self._gap.seconds or self.misses(now, picked, paused.left_s):
            return True
        fixed_s = sizes.fixed_s or 0.0
        mine, others = sizes.weights(picked, [*shorts, *longs])
        costs = paused.weight * (sizes.batch_s(picked) or fixed_s) + step_costs(fixed_s, others)
        return mine * paused.left_s >= costs

    def share(self, now: float, shorts: Sequence[Waiting], longs: Sequence[Waiting], plan: Plan) -> Plan:
        """The plan, with the short batch in the step of the long one if that pays: its first tokens come later, and
        nobody else waits for a step of its own."""
        sizes, picked = self._sizes, [shorts[i] for i in plan.picked]
        fixed_s, joining = sizes.fixed_s or 0.0, sum(sizes.whole_units(w.tokens) for w in picked)
        room = min(plan.long.tokens or sizes.budget, sizes.budget - joining) // sizes.unit * sizes.unit
        if room < plan.long.tokens and joining > sizes.budget // 2:
            return plan  # it would cut the long batch to less than half of a step
        count, long_s = sizes.filling([longs[i] for i in plan.long.picked], room)
        later_s = max(0.0, now + long_s - max(now, self._gap.opens_s(now)))
        if not count or long_s > PATIENCE * self._gap.seconds or self.misses(now, picked, later_s):
            return plan
        mine, others = sizes.weights(picked, [*shorts, *longs])
        if mine * later_s > step_costs(fixed_s, others):
            return plan
        shared = self._longs.cut(plan, longs, plan.long.picked[:count], room, joining)
        oldest = plan.account.oldest and count == len(plan.long.picked)
        return shared._replace(mixed=True, account=plan.account._replace(oldest=oldest))

    def add_overtaking(
        self, now: float, longs: Sequence[Waiting], waiting: int, paused: Paused, budget: int, plan: Plan
    ) -> Plan:
        """The plan, with a batch of long prompts that preempts what is paused, if any should. `waiting`: how many wait
        in all. `budget`: tokens."""
        sizes = self._sizes
        if sizes.fixed_s is None or paused.depth >= OVERTAKE_DEPTH:
            return plan
        new = [i for i, w in enumerate(longs) if not w.started and w.priority <= paused.priority]
        if self._longs.least_work:
            new.sort(key=lambda i: sizes.work_s(longs[i]))
            packed = overtake(
                [longs[i] for i in new], sizes.beside_s, budget=budget, left_s=paused.left_s, running=paused.requests,
                fixed_s=sizes.fixed_s, waiting=waiting,
            )  # fmt: skip
        else:
            new = [i for i in new if longs[i].tokens <= budget and self._goes_before(longs[i], paused, now)]
            new = [new[i] for i in line(self._longs.order, [longs[i] for i in new], sizes, now)]
            batch = [longs[i] for i in new]
            left_s = ends_s(batch[0], sizes, now) if batch else None
            packed = pack(batch, sizes.beside_s, budget=budget, fixed_s=0.0, waiting=0, left_s=left_s or 0.0)
        return self._longs.cut(plan, longs, [new[i] for i in packed], budget) if packed else plan

    def _goes_before(self, item: Waiting, paused: Paused, now: float) -> bool:
        """Return True if the order puts a prompt before the paused batch."""
        if item.deadline_s is None:
            return False
        order, sizes = self._longs.order, self._sizes
        whole_s = max(paused.left_s, paused.requests / paused.weight if paused.weight else 0.0)
        mine = order(item, sizes.work_s(item), sizes.lone_s, now)
        return mine[:-1] < order(Waiting(0, 0, now, paused.deadline_s), paused.left_s, lambda _: whole_s, now)[:-1]
