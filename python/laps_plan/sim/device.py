"""Time of a batch on the simulated device, replayed from a full graph if the server would replay it."""

from __future__ import annotations

import random

from laps_core.config import LapsConfig
from laps_core.ladder import MOST_ROWS, Ladder

from laps_plan.profile import Profile
from laps_plan.sim.request import Batch


class Device:
    """One device. ``graphs``: knobs of LAPS; the device then has the ladder of full graphs for these knobs."""

    def __init__(self, profile: Profile, *, graphs: LapsConfig | None = None, seed: int = 0) -> None:
        c = profile.coefficients
        self._terms = c.alpha, c.linear, c.gamma_r, c.per_request, c.fixed
        self._flat = c.flat
        self.profile = profile
        self._ladder: Ladder | None = None
        if graphs is not None and profile.graph_fixed_s is not None:
            ladder = Ladder.of(graphs, tokens=MOST_ROWS, length=max(graphs.graph_lengths), slots=1 << 20)
            self._ladder = ladder and ladder.with_times({n: self._times(ladder.sample(n), n) for n in ladder.rows})
        self._spread = list(profile.spread)
        self._rng = random.Random(seed)

    def seconds(self, batch: Batch) -> float:
        """Return the time of a step, and mark the batch if it is replayed.

        Rows decoded beside a chunk cost as much as tokens of the chunk, plus the reading of their contexts.
        """
        if not batch.parts:
            return self._spread_out(self.profile.decode_s(batch.streams, batch.context))
        attention = history = longest = 0
        tokens = batch.streams
        for _, new, old in batch.parts:
            attention += new * (new + 2 * old)
            tokens += new
            history += old
            if new > longest:
                longest = new
        count = len(batch.parts)
        alpha, linear, gamma_r, per_request, fixed = self._terms
        counted = tokens if tokens > self._flat else self._flat
        body = alpha * attention + linear * counted + gamma_r * history + per_request * count
        took = body + fixed
        ladder = self._ladder
        if ladder is not None and longest <= ladder.length and not batch.streams:
            new_tokens = [new for _, new, _ in batch.parts]
            rows = ladder.choose(new_tokens)[0] if ladder.admits(new_tokens) else None
            if rows is not None:
                took, batch.replayed = body + self._replay_s(tokens, rows), True
        if batch.streams and self.profile.decode is not None:
            took += self.profile.decode.context * batch.context
        return self._spread_out(took)

    def _spread_out(self, took: float) -> float:
        return took * self._spread[int(self._rng.random() * len(self._spread))] if self._spread else took

    def _replay_s(self, tokens: int, rows: int) -> float:
        """Return the time of a replay beyond the batch's own work (seconds)."""
        alpha, linear, *_ = self._terms
        padding, more = rows - tokens, max(rows, self._flat) - max(tokens, self._flat)
        return (self.profile.graph_fixed_s or 0.0) + linear * more + alpha * padding * padding

    def _times(self, new: list[int], rows: int) -> tuple[float, float]:
        alpha, linear, _, per_request, fixed = self._terms
        counted = max(sum(new), self._flat)
        body = alpha * sum(n * n for n in new) + linear * counted + per_request * len(new)
        return body + fixed, body + self._replay_s(sum(new), rows)
