"""The last minutes of pools and pressures, as the page draws them, and the last moves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laps_core.pools.controller import Move
from laps_core.pools.pressure import POOLS, Pool

from ..servers.instances import PrefillInstance
from .journal import Journal

MOVES_KEPT = 100
TTFT_SPAN_S = 10.0
"""A point of the TTFT history covers this much time (seconds)."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A move and the wall-clock time of it (seconds since 1970)."""

    move: Move
    at: float


class History:
    """One sample for each beat of the control loop, ``samples`` of them."""

    def __init__(self, journal: Journal, samples: int) -> None:
        self.moves: deque[Moved] = deque(maxlen=MOVES_KEPT)
        self.samples: deque[dict[str, Any]] = deque(maxlen=max(2, samples))
        self._journal = journal

    def note(
        self, now: float, instances: Sequence[PrefillInstance], pressure: dict[Pool, float], move: Move | None
    ) -> None:
        """A beat at ``now`` (seconds, monotonic clock): pool and health of each server, pool pressures, any move."""
        at = time.time()
        if move is not None:
            self._journal.counts.moves[move.target] += 1
            self.moves.append(Moved(move, at))
        recent = self._journal.ttft.quantiles_ms(now, TTFT_SPAN_S)
        self.samples.append(
            {
                "at": round(at, 3),
                "pools": ["s" if i.pool == "short" else "l" for i in instances],
                "healthy": [int(i.healthy) for i in instances],
                "pressure": {p: round(pressure[p], 4) for p in POOLS},
                "ttft_p90_ms": {p: recent[p]["p90"] for p in POOLS},
            }
        )
