"""Bounds on waiting: a gap between preemptions, and a share for the oldest prompt. Beyond the paper.

Exchanges see only the requests that wait now. Without these bounds they would spend the device on the fixed costs of
steps, and starve the largest prompt.
"""

from __future__ import annotations

import math

from laps_core.policy.predict import Sizes

SAVED = 4
"""Preemptions that can be saved up: after this many unused gaps, this many may run back to back."""
MANY = 4
"""Number of waiting long prompts above which the gap grows in proportion; also the largest factor of that growth."""
LATE = 0.1
"""Part of the guard's share that is left to a prompt too late for its deadline: other prompts can still be in time."""


class Gap:
    """Least long-class time between two batches that preempt long work. Times are seconds of one clock.

    Each preempting batch costs the fixed time F of a step, because the weights are read once more. One such batch is
    allowed per F / `overhead` of long-class time, so preemption costs at most `overhead` of the device. Up to SAVED
    unused preemptions are saved up: if short requests are few, each preempts on arrival. If short requests are many,
    they gather while long work runs: the device never idles to fill a batch. Batches that would miss a deadline by
    waiting follow each other F apart, for SAVED gaps; such batches can cost more than `overhead`.

    All waiting long prompts pay for a preemption. So if n > MANY of them wait, the gap is n / MANY times as long (at
    most MANY times), but counted from the start of the last batch. Near saturation, steps of few requests take time
    that other requests lack; in a closed loop, soon only clients with long prompts wait.

    Bound: while long work waits, the long class has at least (T - R - P) G / (G + R) of any time T, with G the least
    gap, P = (SAVED - 1) S, and S the longest short batch. R = S if no deadline presses, else SAVED G + S. While S is
    shorter than G, this is half of a long time, or a fifth to a sixth of a long time if deadlines press.
    """

    def __init__(self, overhead: float, sizes: Sizes) -> None:
        """`overhead`: share of the device that preemption may cost (0 < overhead <= 1). `sizes`: give F."""
        self._overhead, self._sizes = overhead, sizes
        self._longs = 0
        self._took_s = 0.0
        self.ended_s = -math.inf
        """End of the last preempting batch."""
        self._owed = 0.0
        """Gaps until all SAVED preemptions are saved up again, as of the launch of the last preempting batch."""
        self._sent = 0
        """Number of preempting batches on the device."""
        self._run_began_s = -math.inf
        """Start of the current run of preempting batches that follow each other within a gap."""
        self._continues_run = False
        """True if the last preempting batch continues that run."""

    @property
    def least_s(self) -> float:
        """Gap while few long prompts wait; 0 while F is unknown."""
        return (self._sizes.fixed_s or 0.0) / self._overhead

    @property
    def seconds(self) -> float:
        """Current gap, counted from the end of the last preempting batch; 0 while F is unknown."""
        return max(self.least_s, min(MANY, self._longs / MANY) * self.least_s - self._took_s)

    def set_paying_longs(self, longs: int) -> None:
        """Set the number of long prompts that pay for a step of few requests; call before each decision."""
        self._longs = longs

    def opens_at(self, ends_at: float = math.inf) -> float:
        """Return the time from which a batch may preempt. The first one may at once, later ones only after the last
        preempting batch has ended. `ends_at`: assumed end of a preempting batch that still runs."""
        saved_s = max(0.0, self._owed - (SAVED - 1)) * self.seconds
        return (ends_at if self._sent else self.ended_s) + saved_s

    def opens_for_deadline_at(self) -> float:
        """Return the time from which a batch may preempt that would miss a deadline by waiting: F after the last
        preempting batch, until the run of such batches has lasted SAVED gaps. Infinite if only ``opens_at`` counts."""
        runs = self.ended_s - self._run_began_s < SAVED * self.least_s
        return math.inf if self._sent or not runs else self.ended_s + (self._sizes.fixed_s or 0.0)

    def record_launch(self, now: float) -> None:
        """Record that a preempting batch goes to the device at `now`."""
        self._continues_run = now < self.ended_s + self.least_s
        paid = max(0.0, now - self.ended_s) / max(self.seconds, 1e-9)
        self._owed = min(float(SAVED), max(0.0, self._owed - paid) + 1.0)
        self._sent += 1

    def record_end(self, begin: float, end: float) -> None:
        """Record that a preempting batch occupied the device from `begin` to `end`."""
        self._sent -= 1
        self._took_s = end - begin
        if not self._continues_run:
            self._run_began_s = begin
        self.ended_s = end


def stretch(gap_s: float, short_s: float, *, deadlines: bool = True) -> float:
    """Return the largest factor by which short batches stretch the time of the long class in the long run. `short_s`:
    longest short batch (seconds). `deadlines`: deadlines press. At the start, SAVED - 1 short batches come on top."""
    return 1.0 + SAVED * deadlines + short_s / gap_s


class Guard:
    """Share of long time for the prompt that has waited longest, whatever the order.

    The guard keeps a credit in device seconds. A long batch without the oldest prompt adds `share` of its time; a batch
    with that prompt subtracts the rest of its time. While the credit is positive, the oldest prompt goes first.

    Bound: of any long time L in which a prompt waits, at least `share` L - B goes to this prompt or earlier prompts,
    with B the longest long batch. So the prompt has its first token after at most (A + B) / share of long time, with A
    the work of all these prompts. With share 0 there is no bound. While the oldest prompt is too late for its deadline,
    the share is LATE times `share`.
    """

    def __init__(self, share: float) -> None:
        """`share`: share of the time of long batches (0..1)."""
        self.share = share
        self.credit_s = self._delay_s = 0.0

    def due(self) -> bool:
        return self.credit_s > 0.0

    def record_batch(self, seconds: float, *, oldest: bool, late: bool = False) -> None:
        """Record that a long batch took the device for `seconds`. `oldest`: the batch contains the prompt that has
        waited longest, as its first prompt or uncut. `late`: that prompt is too late for its deadline.

        One batch bounds both credit and debt: a prompt that could not be placed does not come back with a claim to many
        batches, and a prompt that was often served by chance is not left in debt.
        """
        share = self.share * LATE if late else self.share
        delay_s, self._delay_s = self._delay_s, 0.0
        if oldest:
            self.credit_s = max(self.credit_s, 0.0) - (1.0 - share) * seconds
        else:
            seconds += delay_s
            self.credit_s = min(self.credit_s + share * seconds, seconds)

    def record_delay(self, seconds: float) -> None:
        """Record decode steps that took `seconds`. A batch without the oldest prompt delays it by this time, too."""
        self._delay_s += seconds

    def reset(self) -> None:
        """Reset the credit, because no long work is left: the next arrival starts without credit or debt."""
        self.credit_s = self._delay_s = 0.0
