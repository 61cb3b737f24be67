"""Batches of long prompts: who is in the next one, with whom it shares its step, and who overtakes what is paused.

A smaller long prompt that preempts a paused long batch overtakes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from laps_core.length import LONG
from laps_core.policy.gap import PATIENCE, Gap
from laps_core.policy.guard import Guard
from laps_core.policy.order import LEAST_WORK, ORDERS, Patience, line, slack_s
from laps_core.policy.packing import overtake, pack
from laps_core.policy.plan import LOOKAHEAD, Paused, Plan, Waiting
from laps_core.policy.sizes import Sizes
from laps_core.policy.urgency import fill, left_s, misses, preempting
from laps_core.policy.worth import sharing_pays

OVERTAKE_DEPTH = 2
"""Batches of long work under way at once: one that runs, and one that it has overtaken."""


class LongBatches:
    """Makes the batches of long prompts. Times are seconds of one clock, lengths tokens."""

    def __init__(self, order: str, sizes: Sizes, gap: Gap, guard: Guard) -> None:
        """`order`: a name in ORDERS."""
        self._order, self._least_work = ORDERS[order], order == LEAST_WORK
        self._sizes, self._gap, self._guard = sizes, gap, guard
        self.patience = Patience()

    def make(
        self, now: float, longs: Sequence[Waiting], waiting: int, plan: Plan, *, joining: Sequence[Waiting] = (),
        lacking: bool = False, oldest_first: bool = False,
    ) -> Plan:  # fmt: skip
        """The plan with the next long batch. `waiting`: how many wait in all. `joining`: short requests that share the
        step where it cannot be paused. `lacking`: the last first prompt found no memory, so the guard stands back
        once."""
        if not longs:
            return plan
        sizes, ranks = self._sizes, line(self._order, longs, self._sizes, now)
        oldest = min(range(len(longs)), key=lambda i: longs[i].since_s)
        due = (self._guard.due() if self._least_work else self.patience.due) and not lacking
        if oldest_first or (due and longs[oldest].rank == longs[ranks[0]].rank):
            ranks.remove(oldest)
            ranks.insert(0, oldest)
        fixed_s = math.inf if sizes.fixed_s is None else sizes.fixed_s
        budget, joined = sizes.budget // sizes.unit * sizes.unit, 0
        if not sizes.layers and sizes.chunk is not None:
            joined = sum(sizes.whole_units(w.tokens) for w in joining)
            budget = sizes.timely_chunk(longs[ranks[0]], joined, self._gap.seconds(sizes.fixed_s))
        batch = [longs[i] for i in ranks]
        ends_s = left_s(batch[0], sizes, now)
        if self._least_work or not 0.0 <= ends_s < math.inf:
            packed = pack(batch, sizes.beside_s, budget=budget, fixed_s=fixed_s, waiting=waiting)
        else:
            packed = fill(batch, sizes.beside_s, budget=budget, left_s=ends_s)
        picked = [ranks[i] for i in packed]
        plan = self.cut(plan, longs, picked, budget, joined)
        late = slack_s(longs[oldest], sizes, now) < 0.0
        return plan._replace(oldest=oldest in plan.longs, oldest_late=late, mixed=joined > 0)

    def sharing(
        self, now: float, shorts: Sequence[Waiting], longs: Sequence[Waiting], plan: Plan, soonest_s: float
    ) -> Plan:
        """The long batch with the short requests in its step, if that pays. `soonest_s`: from when on they could
        preempt it."""
        sizes, picked = self._sizes, [shorts[i] for i in plan.picked]
        fixed_s, joining = sizes.fixed_s or 0.0, sum(sizes.whole_units(w.tokens) for w in picked)
        room = min(plan.tokens or sizes.budget, sizes.budget - joining) // sizes.unit * sizes.unit
        if room < plan.tokens and joining > sizes.budget // 2:
            return plan  # it would cut the long batch to less than half of a step
        count, long_s = sizes.filling([longs[i] for i in plan.longs], room)
        later_s = max(0.0, now + long_s - soonest_s)
        if (
            not count
            or long_s > PATIENCE * self._gap.seconds(fixed_s)
            or misses(self._sizes.model, now, picked, later_s)
        ):
            return plan
        mine, others = sizes.weights(picked, [*shorts, *longs])
        if not sharing_pays(mine, later_s=later_s, others=others, fixed_s=fixed_s):
            return plan
        shared = self.cut(plan, longs, plan.longs[:count], room, joining)
        return shared._replace(oldest=plan.oldest and count == len(plan.longs), mixed=True)

    def overtaking(
        self, now: float, longs: Sequence[Waiting], waiting: int, paused: Paused, budget: int, plan: Plan
    ) -> Plan:
        """Never the oldest's turn: it is one that is paused, or will come when that is done. An order by deadlines says
        itself who goes before what is paused."""
        sizes = self._sizes
        if sizes.fixed_s is None or paused.depth >= OVERTAKE_DEPTH or (self._least_work and self._guard.due()):
            return plan
        new = [i for i, w in enumerate(longs) if not w.started and w.rank <= paused.rank]
        if not self._least_work:
            first = preempting(self._order, [longs[i] for i in new], paused, sizes, now, budget)
            return self.cut(plan, longs, [new[i] for i in first], budget) if first else plan
        new.sort(key=lambda i: sizes.work_s(longs[i]))
        packed = overtake(
            [longs[i] for i in new], sizes.beside_s, budget=budget, left_s=paused.left_s, running=paused.requests,
            fixed_s=sizes.fixed_s, waiting=waiting,
        )  # fmt: skip
        return self.cut(plan, longs, [new[i] for i in packed], budget) if packed else plan

    def cut(self, plan: Plan, longs: Sequence[Waiting], picked: Sequence[int], budget: int, joining: int = 0) -> Plan:
        """The batch of these, of which the last is cut where the budget (tokens) ends."""
        sizes, batch = self._sizes, [longs[i] for i in picked[:LOOKAHEAD]]
        tokens = min(budget, sum(w.tokens for w in batch))
        layers, parts = sizes.slice_layers(batch, tokens)
        return plan._replace(
            order=(LONG,),
            longs=tuple(picked[:LOOKAHEAD]),
            tokens=0 if sizes.chunk is None else min(sizes.budget, sizes.whole_units(tokens) + joining),
            layers=layers,
            parts=parts,
        )
