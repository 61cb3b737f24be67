"""Choice of the budget that all ranks take: the budget with the most useful work per cost of waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laps_core.group.menu import Menu


class Choice(NamedTuple):
    """Budget that all ranks take for their next step."""

    level: int
    """Index into the ladder, the same on every rank."""
    seconds: float
    """Predicted time of the step."""
    own_s: tuple[float, ...]
    """Predicted own part of each rank."""
    oldest: bool
    """True if each rank's oldest long prompt goes first."""

    @property
    def waits(self) -> float:
        """Share of rank-time that ranks will wait for the slowest (0..1)."""
        return (max(self.own_s) - sum(self.own_s) / len(self.own_s)) / self.seconds


def step_s(menus: Sequence[Menu], level: int, *, padded: bool) -> float:
    """Return the predicted time of a step in which every rank runs its batch of `level` (seconds); 0 if all ranks are
    idle. `padded`: see ``GroupCost.padded``."""
    terms, batches = menus[0].terms, [menu.levels[level] for menu in menus]
    tokens = [b.tokens for b in batches]
    if not any(tokens):
        return 0.0
    seen = len(menus) * max(tokens) if padded else sum(tokens)
    own_us = max(b.own_us for b in batches)
    return 1e-6 * (terms.fixed_us + own_us + max(terms.expert_floor_us, 1e-6 * terms.expert_ps * seen))


def choose(menus: Sequence[Menu], *, oldest: bool = False, padded: bool = False) -> Choice | None:
    """Choose the budget of the next step, equal on all ranks, from their menus alone. None: no prefill batch can run.

    A step of t seconds costs W t + A t^2 / 2: all waiting requests (weight W) wait for t, and requests that arrive
    meanwhile (weight A per second) wait for t / 2 on average. The budget with the most useful work per cost is chosen.
    The smallest budget is for short requests, and is not chosen while a long prompt waits. ``oldest``: each rank's
    oldest long prompt goes first, and the budget is large enough for all of these prompts to make progress.

    If ranks also decode, the step must end before any rank's next decode step has to start. If no step does, return
    None: all ranks decode now. But prompts first get the time that is owed to them (``Waits.owed_us``), even if the
    smallest step takes longer.
    """
    weight = sum(menu.waits.weight for menu in menus) or 1
    coming = sum(menu.waits.coming for menu in menus)
    levels = range(len(menus[0].levels))
    times = [step_s(menus, k, padded=padded) for k in levels]
    runs = [k for k in levels if times[k] > 0.0]
    if not runs:
        return None
    long = any(menu.waits.longs for menu in menus)
    least = max((menu.waits.least for menu in menus if oldest and menu.waits.longs), default=int(long))
    useful = [sum(menu.levels[k].useful_us for menu in menus) for k in levels]
    able = [k for k in runs if k >= least] or runs[-1:]
    until_decode_us = min(menu.waits.until_decode_us for menu in menus)
    owed_us = max(menu.waits.owed_us for menu in menus)
    in_time = [k for k in able if 1e6 * times[k] <= max(until_decode_us, owed_us)]
    if not in_time and not owed_us:
        return None
    best = max(
        in_time or able[:1],
        key=lambda k: (useful[k] / (times[k] * (weight + coming * times[k] / 2.0)), -k),
    )
    return at(menus, best, oldest=oldest, padded=padded)


def at(menus: Sequence[Menu], level: int, *, oldest: bool, padded: bool) -> Choice:
    own_s = tuple(1e-6 * menu.levels[level].own_us for menu in menus)
    return Choice(level, step_s(menus, level, padded=padded), own_s, oldest)
