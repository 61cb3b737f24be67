"""Time of a batch on the simulated device."""

from __future__ import annotations

import random

from laps_plan.profile import Profile
from laps_plan.sim.request import Batch


class Device:
    """One device."""

    def __init__(self, profile: Profile, *, seed: int = 0) -> None:
        c = profile.coefficients
        self._terms = c.alpha, c.linear, c.gamma_r, c.per_request, c.fixed
        self._flat = c.flat
        self.profile = profile
        self._spread = list(profile.spread)
        self._rng = random.Random(seed)

    def seconds(self, batch: Batch) -> float:
        """Return the time of a step.

        Rows decoded beside a chunk cost as much as tokens of the chunk, plus the reading of their contexts.
        """
        if not batch.parts:
            return self._spread_out(self.profile.decode_s(batch.streams, batch.context))
        attention = history = 0
        tokens = batch.streams
        for _, new, old in batch.parts:
            attention += new * (new + 2 * old)
            tokens += new
            history += old
        count = len(batch.parts)
        alpha, linear, gamma_r, per_request, fixed = self._terms
        counted = tokens if tokens > self._flat else self._flat
        took = alpha * attention + linear * counted + gamma_r * history + per_request * count + fixed
        if batch.streams and self.profile.decode is not None:
            took += self.profile.decode.context * batch.context
        return self._spread_out(took)

    def _spread_out(self, took: float) -> float:
        return took * self._spread[int(self._rng.random() * len(self._spread))] if self._spread else took
