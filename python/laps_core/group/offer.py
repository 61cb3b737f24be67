"""Batches that a rank would run with each budget of the ladder: prompts by least work, and a chunk of the next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from laps_core.group.cost import GRAIN, GroupCost
from laps_core.group.menu import LADDER, Level
from laps_core.group.prompt import Prompt
from laps_core.length import whole_units

FIRST_SHARE = 0.5
"""Share of a batch's budget reserved for the prompt that goes first; other prompts get the rest."""


class Pick(NamedTuple):
    """A prompt of a batch."""

    prompt: int
    """Index into the prompts given to ``Offer``."""
    tokens: int
    """New tokens to run: all that are left, or a chunk."""


class _Batch(NamedTuple):
    """Batch that a rank would run with one budget."""

    level: Level
    whole: int
    """Number of prompts, from the start of the order, that run to their end."""
    cut: tuple[Pick, ...]
    """A chunk of another prompt, and the prompt that goes first (whole, or a chunk)."""


class Offer:
    """Batches of a rank, one for each budget, from which its menu is made.

    Prompts are ordered by least work. A batch takes whole prompts while its own part stays within the budget, then a
    chunk of the next prompt. This order puts short requests first, so they run on every rank. The prompt ``first`` (an
    index) gets FIRST_SHARE of the budget before all other prompts, and what they leave unused. A chunk that would spend
    more than half of its time on unpacking history is not cut, except with the largest budget, so that some prompt
    makes progress.
    """

    def __init__(
        self,
        cost: GroupCost,
        prompts: Sequence[Prompt],
        *,
        chunk: int,
        page: int = 1,
        unit: int = 1,
        first: int | None = None,
        whole: bool = False,
        ladder: Sequence[float] = LADDER,
    ) -> None:
        """``chunk``: most new tokens of a batch, limited by memory; each prompt takes whole pages of it. ``page``: page
        size (tokens). ``unit``: a cut prompt ends on a multiple of this (tokens). ``whole``: take only whole prompts of
        which no chunk has run. ``ladder``: budgets in ascending order (seconds)."""
        self._cost, self._prompts, self._chunk, self.first = cost, prompts, chunk, first
        self._page, self._unit, self._least = page, unit, whole_units(GRAIN, unit)
        # SGLang has one slot for a prompt in progress, and the preempted step uses it.
        others = (i for i, p in enumerate(prompts) if i != first and not (whole and p.started))
        self._order = sorted(others, key=lambda i: (prompts[i].work_s, i))
        self._whole = whole
        ordered = [prompts[i] for i in self._order]
        self._tokens = list(accumulate((p.tokens for p in ordered), initial=0))
        self._paged = list(accumulate((whole_units(p.tokens, page) for p in ordered), initial=0))
        self._own_s = list(accumulate((self._own_part_s(p, p.tokens) for p in ordered), initial=0.0))
        useful_s = (cost.useful_s(p.tokens, p.history) for p in ordered)
        self._useful_s = list(accumulate(useful_s, initial=0.0))
        self._weight = list(accumulate((p.weight for p in ordered), initial=0.0))
        self._batches = [self._batch(budget_s, budget_s == ladder[-1]) for budget_s in ladder]
        self.levels = tuple(batch.level for batch in self._batches)

    def picks(self, level: int) -> list[Pick]:
        _, whole, cut = self._batches[level]
        return [*(Pick(i, self._prompts[i].tokens) for i in self._order[:whole]), *cut]

    def least(self) -> int:
        """Return the smallest level at which the prompt that goes first makes progress; 0 if none goes first."""
        if self.first is None:
            return 0
        runs = (k for k, b in enumerate(self._batches) if any(pick.prompt == self.first for pick in b.cut))
        return next(runs, len(self._batches) - 1)

    def _own_part_s(self, p: Prompt, tokens: int) -> float:
        """Return the own part of ``tokens`` of a prompt."""
        return self._cost.token * tokens + self._cost.attention_s(tokens, p.history)

    def _batch(self, budget_s: float, last: bool) -> _Batch:
        cost = self._cost
        cut: list[Pick] = []
        first_s, taken = 0.0, 0
        if self.first is not None:
            p = self._prompts[self.first]
            shares = (FIRST_SHARE, 1.0)
            taken = next(
                filter(None, (self._chunk_tokens(p, s * budget_s, self._chunk, last, True) for s in shares)), 0
            )
            first_s = self._own_part_s(p, taken) if taken else 0.0
        kept = whole_units(taken, self._page)
        fits = bisect_right(self._own_s, budget_s - first_s), bisect_right(self._paged, self._chunk - kept)
        whole = max(0, min(fits) - 1)
        left_s, room = budget_s - first_s - self._own_s[whole], self._chunk - kept - self._paged[whole]
        for i in () if self._whole else self._list_cuttable(whole):
            p = self._prompts[i]
            if i != self.first:
                tokens = self._chunk_tokens(p, left_s, room, last, not whole and not taken)
            else:
                tokens = max(taken, self._chunk_tokens(p, left_s + first_s, room + kept, last, not whole))
            cut += [Pick(i, tokens)] * bool(tokens)
            if i != self.first or tokens < p.tokens:
                break
            left_s += first_s - self._own_part_s(p, tokens)
            room += kept - whole_units(tokens, self._page)
        own_s, useful_s, tokens = self._own_s[whole], self._useful_s[whole], self._tokens[whole]
        weight = self._weight[whole]
        for i, n in cut:
            p = self._prompts[i]
            own_s, tokens = own_s + self._own_part_s(p, n), tokens + n
            useful_s += cost.useful_s(n, p.history)
            weight += p.weight
        own_s = max(own_s, cost.own_floor) if tokens else 0.0
        level = Level(round(1e6 * own_s), tokens, round(1e6 * useful_s), round(1e3 * weight))
        return _Batch(level, whole, tuple(cut))

    def _list_cuttable(self, whole: int) -> Iterator[int]:
        """Yield the prompts that can be cut, in order: the prompt that goes first, then all that do not run whole."""
        if self.first is not None:
            yield self.first
        yield from self._order[whole:]

    def _chunk_tokens(self, p: Prompt, left_s: float, room: int, last: bool, alone: bool) -> int:
        """Return how many new tokens of a prompt fit into ``left_s`` more of own part and ``room`` tokens; 0 if no
        chunk is worth running. ``last``: the budget is the largest; ``alone``: no other prompt would run."""
        if whole_units(p.tokens, self._page) <= room and self._own_part_s(p, p.tokens) <= left_s:
            return p.tokens
        piece = min(self._cost.most_tokens(left_s, p.history), room, p.tokens) // self._unit * self._unit
        if last and alone and piece < self._least:
            return max(0, min(self._least, room, p.tokens))
        if piece < self._least:
            return 0
        took_s = self._cost.attention_s(piece, p.history)
        read_s = min(self._cost.unpack * p.history, took_s)
        return piece if last or 2.0 * read_s <= took_s + self._cost.token * piece else 0
