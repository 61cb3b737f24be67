"""The gap: how far apart two preemptions of long work are. Beyond the paper."""

from __future__ import annotations

import math

PATIENCE = 8.0
"""A short request that has waited this many gaps preempts even where that does not pay."""
RUN = 3.0
"""Short batches with a deadline that presses may follow each other for this many gaps, before long work has its next
one."""
SAVED = 4
"""So many preemptions may follow each other at once, where there was none for as many gaps."""
UNKNOWN = 2.0
"""While a step's fixed time is not known, the gap is this many times the last short batch."""
START_S = 0.025
"""The gap before anything was measured: some 6.4 ms of fixed time, an 8B model on an H200, at the default overhead."""


class Gap:
    """Keeps batches that preempt long work apart. Times are seconds of one clock.

    Each such batch costs a step's fixed time F, for the weights are read once more. There is one in each F / `overhead`
    of the time that long work has, so preemption costs at most `overhead` of the device. Those that were not needed are
    saved up, to SAVED: where short requests are few, each preempts as it comes. Where they are many they gather, and
    long work runs meanwhile: the device never idles for the sake of a fuller batch.

    Once the gap is over a batch preempts where that pays (``worth``), and in any case when one of its requests has
    waited for PATIENCE gaps. Batches that would miss a deadline by waiting follow each other a fixed time apart, for
    RUN gaps; they may cost more than `overhead`.

    Bound: while long work waits, of any time T the long class has at least (T - R - P) G / (G + R), with G the gap,
    P = (SAVED - 1) S, and S the longest short batch. R = S where no deadline presses, else RUN G + S: half of a long
    time, or a quarter to a fifth of it, while S is shorter than G.
    """

    def __init__(self, overhead: float) -> None:
        """`overhead`: share of the device that preemption may cost (0 < overhead <= 1)."""
        self._overhead = overhead
        self.ended_s = -math.inf
        """When the last batch had run."""
        self._owed = 0.0
        """Gaps until all is saved up again, when the last batch had been sent."""
        self._sent = 0
        self._last_s: float | None = None
        self._begun_s = -math.inf
        self._follows = False

    def seconds(self, fixed_s: float | None) -> float:
        """The gap (seconds). `fixed_s`: F, None = not known."""
        if fixed_s is not None:
            return fixed_s / self._overhead
        return START_S if self._last_s is None else UNKNOWN * self._last_s

    def opens_s(self, fixed_s: float | None) -> float:
        """From when on a batch may preempt: at once at first, not before the last one has ended."""
        return math.inf if self._sent else self._opens_s(self.ended_s, self.seconds(fixed_s))

    def soonest_s(self, now: float, fixed_s: float | None) -> float:
        """The same, as if what is on the device ended at `now`."""
        return self._opens_s(now if self._sent else self.ended_s, self.seconds(fixed_s))

    def presses_s(self, fixed_s: float | None) -> float:
        """From when on a batch may preempt that a deadline does not let wait: a fixed time after the last one, in a run
        of RUN gaps. Infinite where only ``opens_s`` counts."""
        runs = self.ended_s - self._begun_s < RUN * self.seconds(fixed_s)
        return math.inf if self._sent or not runs else self.ended_s + (fixed_s or 0.0)

    def _opens_s(self, ended_s: float, gap_s: float) -> float:
        return ended_s + max(0.0, self._owed - (SAVED - 1)) * gap_s

    def sent(self, now: float = math.inf, fixed_s: float | None = None) -> None:
        """A batch that preempts goes to the device."""
        gap_s = self.seconds(fixed_s)
        self._follows = now < self.ended_s + gap_s
        paid = max(0.0, now - self.ended_s) / max(gap_s, 1e-9) if math.isfinite(now) else 0.0
        self._owed = min(float(SAVED), max(0.0, self._owed - paid) + 1.0)
        self._sent += 1

    def ran(self, begin: float, end: float) -> None:
        """A batch that preempted has had the device from `begin` to `end`."""
        self._sent -= 1
        if not self._follows:
            self._begun_s = begin
        self.ended_s, self._last_s = end, end - begin


def stretch(gap_s: float, short_s: float, *, deadlines: bool = True) -> float:
    """How many times as long as alone the long class may take in the long run, with short batches of at most `short_s`
    seconds, with `deadlines` that press or without. At first, SAVED - 1 such batches come on top."""
    return 1.0 + RUN * deadlines + short_s / gap_s
