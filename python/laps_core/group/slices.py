"""Slices with common boundaries: if it pays, a step of whole requests preempts a longer step on all ranks at once.

A step of a group costs every rank its fixed time F, and ranks without a request run an idle batch. So preempting pays
if steps are long (histories, documents), hardly ever in chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laps_core.group.choice import Choice, at, step_s
from laps_core.group.menu import Menu
from laps_core.policy.exchange import AHEAD
from laps_core.policy.fairness import SAVED

LONGER = 5.0
"""Slices of a group are this many times ``slice_ms``, because each pause costs an exchange between the ranks."""
DEPTH = 2
"""Most steps paused at the same time."""


@dataclass(slots=True)
class _Paused:
    left: int
    slice_s: float
    weight: float


class Slices:
    """Paused steps, and the decision to preempt them. Uses the gathered rows alone, and predicted instead of measured
    times, so that every rank decides alike.

    One preemption is allowed per F / `overhead` of predicted time. Unused preemptions are saved, up to SAVED.
    """

    def __init__(self, layers: int, slice_s: float, overhead: float) -> None:
        """``layers``: most slices of a step. ``slice_s``: target for the time of a slice (seconds). ``overhead``: share
        of the time that the fixed times of preempting steps may cost (0 < overhead <= 1)."""
        self._layers = layers
        self._slice_s, self._overhead = slice_s, overhead
        self._paused: list[_Paused] = []
        self._saved = float(SAVED)
        self._preempts: Choice | None = None
        """Step that was chosen as a preemption; it counts as one when it starts: perhaps no rank can build it."""

    @property
    def paused(self) -> bool:
        """True if a step is under way."""
        return bool(self._paused)

    @property
    def may_preempt(self) -> bool:
        """True if a step may preempt the running step, so that ranks exchange menus in the next pause."""
        return 0 < len(self._paused) <= DEPTH and self._paused[-1].left > 1 and self._saved >= 1.0

    def start_step(self, menus: Sequence[Menu], choice: Choice) -> int:
        """Start a step; return its number of slices."""
        self._saved, self._preempts = self._saved - (choice == self._preempts), None
        long = choice.seconds > 2.0 * self._slice_s
        parts = min(self._layers, max(2, int(choice.seconds / self._slice_s))) if long else 1
        weight = sum(menu.levels[choice.level].weight for menu in menus)
        self._paused.append(_Paused(parts, choice.seconds / parts, weight))
        return parts

    def record_slice(self, fixed_s: float) -> None:
        """Count a slice of the step that began last as run. ``fixed_s``: time of the smallest step (seconds)."""
        top = self._paused[-1]
        top.left -= 1
        if not top.left:
            self._paused.pop()
        self._saved = min(SAVED, self._saved + top.slice_s * self._overhead / max(fixed_s, 1e-9))

    def choose_preempting(self, menus: Sequence[Menu], *, fixed_s: float, padded: bool) -> Choice | None:
        """Return the step to run in this pause, from menus of whole requests (``whole``); None if no step pays.

        Requests of the new step gain the remaining time of the step paused last. Requests of all paused steps lose the
        time of the new step. All other waiting requests lose the fixed time of a step; each of them counts AHEAD times,
        to stand for requests still to come.
        """
        top = self._paused[-1]
        # The next slice has been launched already.
        left_s = (top.left - 1) * top.slice_s
        below = sum(paused.weight for paused in self._paused)
        all_weight = sum(menu.waits.weight for menu in menus)
        best, gain = None, 0.0
        for k in range(len(menus[0].levels)):
            took_s = step_s(menus, k, padded=padded)
            mine = sum(menu.levels[k].weight for menu in menus)
            now = mine * left_s - below * took_s - (all_weight - mine) * fixed_s * AHEAD
            if 0.0 < took_s <= left_s and now > gain:
                best, gain = k, now
        if best is None:
            return None
        self._preempts = at(menus, best, oldest=False, padded=padded)
        return self._preempts

    def shorts_first(self, menus: Sequence[Menu], choice: Choice, *, fixed_s: float, padded: bool) -> Choice:
        """Return a level 0 step, for short requests, if that pays before `choice` and may preempt it; else `choice`."""
        if self._saved < 1.0 or not choice.level or not (first_s := step_s(menus, 0, padded=padded)):
            return choice
        mine = sum(menu.waits.shorts for menu in menus)
        others = sum(menu.waits.weight for menu in menus) - mine
        if mine * (choice.seconds - first_s) <= others * fixed_s * AHEAD:
            return choice
        self._preempts = at(menus, 0, oldest=False, padded=padded)
        return self._preempts
