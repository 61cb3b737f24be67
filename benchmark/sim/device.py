"""How long a batch takes on the simulated device, from a graph cell where one pays."""

from __future__ import annotations

import random

from laps_core.buckets import Batch as Shape
from laps_core.buckets import Buckets, Cell
from laps_core.config import LapsConfig
from sglang_laps.graphs.plan import Limits, make_plan

from benchmark.sim.profile import Profile
from benchmark.sim.request import Batch


class Device:
    """One device. With ``cells`` (the configured grid) a covered batch replays where its predicted time is less."""

    def __init__(self, profile: Profile, *, cells: LapsConfig | None = None, seed: int = 0) -> None:
        c = profile.coefficients
        self._terms = c.alpha, c.linear, c.gamma_r, c.per_request, c.fixed
        self.profile = profile
        self._cell_fixed_s = profile.cell_fixed_s
        self._buckets: Buckets | None = None
        if cells is not None and profile.cell_fixed_s is not None:
            top = max(cells.graph_lengths)
            plan = make_plan(cells, Limits(tokens=cells.graph_max_tokens, length=top, slots=1 << 20, granule=8))
            if plan is not None:
                self._buckets = Buckets(plan.cells, pad_max=cells.graph_pad_max, granule=plan.granule)
        self._found: dict[tuple[int, int, int], Cell | None] = {}
        self._spread = list(profile.spread)
        self._rng = random.Random(seed)

    def seconds(self, batch: Batch) -> float:
        """Time of a step; marks the batch as replayed if it is."""
        attention = tokens = history = longest = 0
        for _, new, old in batch.parts:
            attention += new * (new + 2 * old)
            tokens += new
            history += old
            if new > longest:
                longest = new
        count = len(batch.parts)
        alpha, linear, gamma_r, per_request, fixed = self._terms
        body = alpha * attention + linear * tokens + gamma_r * history + per_request * count
        took = body + fixed
        if self._buckets is not None and self._cell_fixed_s is not None:
            cell = self._cell(tokens, longest, count, batch)
            if cell is not None:
                rows = cell.tokens - tokens
                replay = body + self._cell_fixed_s + linear * rows + alpha * rows * rows
                if replay < took:
                    took, batch.replayed = replay, True
        if self._spread:
            took *= self._spread[int(self._rng.random() * len(self._spread))]
        return took

    def _cell(self, tokens: int, longest: int, count: int, batch: Batch) -> Cell | None:
        key = tokens, longest, count
        try:
            return self._found[key]
        except KeyError:
            cell = self._buckets.nearest(Shape.of(new for _, new, _ in batch.parts)) if self._buckets else None
            self._found[key] = cell
            return cell
