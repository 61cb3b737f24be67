"""When the pools are looked at and when they are changed: one step for the router and for its simulation."""

from __future__ import annotations

from collections.abc import Iterable

from laps_core.pools.controller import Move, PoolController
from laps_core.pools.pressure import InstanceSignals, PressureConfig


class ControlLoop:
    """Takes the signals of each beat and decides once each control period. All times are the caller's (seconds)."""

    def __init__(self, config: PressureConfig, start_s: float) -> None:
        """The first decision comes a period after ``start_s``."""
        self.controller = PoolController(config)
        self._config = config
        self._decide_at = start_s + config.period_s

    def step(self, now: float, signals: Iterable[InstanceSignals]) -> Move | None:
        """One beat. The caller carries the move out, if there is one."""
        self.controller.observe(now, signals)
        period_s = self._config.period_s
        # Half a sample of tolerance: a decision belongs to the beat nearest to it.
        if now + self._config.sample_s / 2 < self._decide_at:
            return None
        # Beats that were left out move the grid; those that were late do not.
        self._decide_at = max(self._decide_at, now - period_s / 2) + period_s
        return self.controller.decide(now)
