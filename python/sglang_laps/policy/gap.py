"""The gap: how far apart two preemptions of long work are. Beyond the paper."""

from __future__ import annotations

import math

AIM = 4.0
"""A long prompt is far behind once it has waited this many times its own lone time."""
WIDEST = 8.0
"""The gap is widened to this many times itself at most."""
UNKNOWN = 2.0
"""While a step's fixed time is not known, the gap is this many times the last short batch."""
START_S = 0.03
"""The gap before anything was measured: some 4.5 ms of fixed time, a 7B model on an H200, at the default overhead."""


class Gap:
    """Keeps batches that preempt long work apart. Times are seconds of one clock.

    Each such batch costs a step's fixed time F, for the weights are read once more. Two are at least F / `overhead`
    apart, so preemption costs at most `overhead` of the device. Short requests gather meanwhile, and long work runs:
    the device never idles for the sake of a fuller batch.

    The gap widens in proportion once the long prompt furthest behind has waited more than AIM times its lone time, to
    WIDEST times itself: under overload both classes pay.

    Bound: while long work waits, of any time T the long class has at least (T - S) G / (G + S), with G the gap and S
    the longest short batch.
    """

    def __init__(self, overhead: float) -> None:
        """`overhead`: share of the device that preemption may cost (0 < overhead <= 1)."""
        self._overhead = overhead
        self._ended_s = -math.inf
        self._sent = 0
        self._last_s: float | None = None

    def seconds(self, fixed_s: float | None, behind: float = 0.0) -> float:
        """The gap (seconds). `fixed_s`: F, None = not known. `behind`: wait over lone time of the worst long prompt."""
        if fixed_s is not None:
            narrow = fixed_s / self._overhead
        else:
            narrow = START_S if self._last_s is None else UNKNOWN * self._last_s
        return narrow * min(WIDEST, max(1.0, behind / AIM))

    def opens_s(self, fixed_s: float | None, behind: float = 0.0) -> float:
        """From when on a batch may preempt: at once at first, not before the last one has ended."""
        return math.inf if self._sent else self._ended_s + self.seconds(fixed_s, behind)

    def sent(self) -> None:
        """A batch that preempts goes to the device."""
        self._sent += 1

    def ran(self, begin: float, end: float) -> None:
        """It had the device from `begin` to `end`."""
        self._sent -= 1
        self._ended_s, self._last_s = end, end - begin
