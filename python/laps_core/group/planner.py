"""Joint plan of all ranks: they exchange menus, and each rank derives the same next step from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from laps_core.config import LapsConfig
from laps_core.group.choice import Choice, choose
from laps_core.group.cost import GroupCost, OwnShape
from laps_core.group.menu import LADDER, NO_DECODE_DUE, Menu, Terms, Waits
from laps_core.group.offer import Offer, Pick
from laps_core.group.prompt import Prompt
from laps_core.group.slices import LONGER, Slices
from laps_core.policy.fairness import Guard

MEMORY_S = 5.0
"""Time constant of the average arrival rate (seconds)."""
STEP_S = 0.054
"""Time of the smallest step on the devices for which LADDER is made (seconds)."""
LEAST_STEP_S = 1e-3
NOTHING = OwnShape(0, 0, 0, 0)


class GroupPlanner:
    """Runs the joint plan on one rank. Each round: ``menu``, a gather of all rows, ``decide``, ``picks``.

    Every rank decides from the gathered rows alone, so all decide alike. While long prompts wait, the share ``guard``
    of the time goes to steps in which each rank's oldest long prompt goes first.

    Bound: of any time T in which a long prompt x waits, at least ``guard`` T - B goes to such steps, with B the longest
    step. In each such step, x or a long prompt that came to its rank before x has half of the budget, or ends. If n
    such steps are needed, x has its first token after at most (n + 1) B / ``guard``. All ranks work on their oldest
    prompts at once, so n counts steps for prompts of x's rank only. With ``guard`` 0 there is no bound.
    """

    def __init__(
        self,
        cost: GroupCost,
        config: LapsConfig,
        *,
        chunk: int,
        page: int = 1,
        unit: int = 1,
        layers: int | None = None,
    ) -> None:
        """``chunk``: most new tokens of a rank's batch. ``page``, ``unit``: see ``Offer``. ``layers``: layers of the
        model if steps run in slices; None: steps run whole."""
        self.cost = cost
        self.chunk = chunk
        self._make_offer = partial(Offer, page=page, unit=unit)
        self._guard = Guard(config.guard)
        slice_s, overhead = LONGER * config.slice_ms / 1e3, config.preempt_overhead
        self.slices = None if layers is None else Slices(layers, slice_s, overhead)
        self._offer: Offer | None = None
        self._coming = self._came = 0.0
        self._seen_s: float | None = None

    @property
    def oldest_first(self) -> bool:
        """Return True if each rank's oldest long prompt goes first in the next step."""
        return self._guard.due()

    def count_arrival(self, weight: float) -> None:
        """Count a request of ``weight`` that has arrived at this rank."""
        self._came += weight

    def menu(
        self,
        now: float,
        prompts: Sequence[Prompt],
        ran: OwnShape = NOTHING,
        *,
        until_decode_s: float = math.inf,
        owed_s: float = 0.0,
    ) -> Menu:
        """Make this rank's menu. ``ran``: its batch in the previous step. ``until_decode_s``: time until its next
        decode step has to start; ``owed_s``: time owed to prompts before that step (seconds)."""
        self._learn_arrivals(now)
        longs = [i for i, p in enumerate(prompts) if p.long]
        oldest = min(longs, key=lambda i: (prompts[i].since_s, i), default=None)
        within = self.slices is not None and self.slices.paused
        # The activations of a preempting step need memory beside the activations of the paused step.
        chunk = self.chunk // 2 if within else self.chunk
        first = oldest if self.oldest_first and not within else None
        # Budgets scale with the device: if the smallest step takes twice as long, budgets double.
        scale = max(self.cost.step_s, LEAST_STEP_S) / STEP_S
        ladder = [scale * budget_s for budget_s in LADDER]
        made = self._make_offer(self.cost, prompts, first=first, chunk=chunk, whole=within, ladder=ladder)
        self._offer = made
        waits = Waits(
            round(1e3 * sum(p.weight for p in prompts)),
            round(1e3 * self._coming),
            round(1e3 * sum(p.weight for p in prompts if not p.long)),
            len(longs),
            made.least(),
            max(0, round(1e6 * min(until_decode_s, 1e-6 * NO_DECODE_DUE))),
            round(1e6 * owed_s),
        )
        cost = self.cost
        terms = Terms(*(round(1e6 * s) for s in (cost.fixed, cost.own_floor, cost.expert_floor, 1e6 * cost.expert)))
        return Menu(made.levels, waits, terms, ran)

    def decide(self, menus: Sequence[Menu]) -> Choice | None:
        """Choose the next step of all ranks, from their menus in rank order; None: no batch runs now."""
        padded = self.cost.padded
        fixed_s = self.step_s(menus)
        longs = any(menu.waits.longs for menu in menus)
        if self.slices is not None and self.slices.paused:
            choice = self.slices.choose_preempting(menus, fixed_s=fixed_s, padded=padded)
            if choice is not None and longs:
                self._guard.record_batch(choice.seconds, oldest=False)
            return choice
        choice = choose(menus, oldest=self.oldest_first, padded=padded)
        if not longs:
            self._guard.reset()
        if choice is None or not longs:
            return choice
        if self.slices is not None and not choice.oldest:
            choice = self.slices.shorts_first(menus, choice, fixed_s=fixed_s, padded=padded)
        self._guard.record_batch(choice.seconds, oldest=choice.oldest)
        return choice

    @property
    def first(self) -> int | None:
        """Index of the prompt that goes first, as of the last menu; None if none does."""
        return None if self._offer is None else self._offer.first

    def picks(self, choice: Choice) -> list[Pick]:
        assert self._offer is not None
        return self._offer.picks(choice.level)

    @staticmethod
    def step_s(menus: Sequence[Menu]) -> float:
        """Return the time of the smallest step (seconds), equal on all ranks."""
        terms = menus[0].terms
        return 1e-6 * (terms.fixed_us + terms.own_floor_us + terms.expert_floor_us)

    def _learn_arrivals(self, now: float) -> None:
        if self._seen_s is None:
            self._seen_s = now
        if (passed := now - self._seen_s) > 0.0:
            kept = math.exp(-passed / MEMORY_S)
            self._coming = self._coming * kept + self._came / passed * (1.0 - kept)
            self._came, self._seen_s = 0.0, now
