"""Bounds on who waits for whom: a gap between preemptions, a share for the oldest. Beyond the paper.

An exchange sees only who waits now: alone it spends the device on steps, and starves the largest prompt.
"""

from __future__ import annotations

import math

from laps_core.policy.predict import Sizes

SAVED = 4
"""So many preemptions may follow each other at once, where there was none for as many gaps."""
MANY = 4
"""Gaps grow with the long prompts that wait if these are more than this, to so many times."""
LATE = 0.1
"""Part of the guard's share that a prompt keeps which is too late for its deadline: others can still be in time."""


class Gap:
    """Keeps batches that preempt long work apart. Times are seconds of one clock.

    Each such batch costs a step's fixed time F, for the weights are read once more. There is one in each F / `overhead`
    of the time that long work has, so preemption costs at most `overhead` of the device. Those that were not needed are
    saved up, to SAVED: where short requests are few, each preempts as it comes. Where they are many they gather, and
    long work runs meanwhile: the device never idles for the sake of a fuller batch. Batches that would miss a deadline
    by waiting follow each other a fixed time apart, for SAVED gaps; they may cost more than `overhead`.

    All long prompts that wait pay for a step. So where these are n > MANY the gap is n / MANY times as long, but
    counted from the begin of the last batch: near saturation steps of few requests are what others lack, and in closed
    loops the clients of long prompts are soon all that there are.

    Bound: while long work waits, of any time T the long class has at least (T - R - P) G / (G + R), with G the least
    gap, P = (SAVED - 1) S, and S the longest short batch. R = S where no deadline presses, else SAVED G + S: half of a
    long time, or a fifth to a sixth of it, while S is shorter than G.
    """

    def __init__(self, overhead: float, sizes: Sizes) -> None:
        """`overhead`: share of the device that preemption may cost (0 < overhead <= 1). `sizes`: know F."""
        self._overhead, self._sizes = overhead, sizes
        self._longs = 0
        self._took_s = 0.0
        self.ended_s = -math.inf
        """When the last batch had run."""
        self._owed = 0.0
        """Gaps until all is saved up again, when the last batch had been sent."""
        self._sent = 0
        self._begun_s = -math.inf
        self._follows = False

    @property
    def least_s(self) -> float:
        """The gap while few long prompts wait; 0 while F is not known."""
        return (self._sizes.fixed_s or 0.0) / self._overhead

    @property
    def seconds(self) -> float:
        """The gap, from the end of the last batch; 0 while F is not known."""
        return max(self.least_s, min(MANY, self._longs / MANY) * self.least_s - self._took_s)

    def watch(self, longs: int) -> None:
        """So many long prompts wait or are paused, and pay for a step of few; call it before each decision."""
        self._longs = longs

    def opens_s(self, ends_s: float = math.inf) -> float:
        """From when on a batch may preempt: at once at first, not before the last one has ended. `ends_s`: when one
        that is on the device is taken to end."""
        saved_s = max(0.0, self._owed - (SAVED - 1)) * self.seconds
        return (ends_s if self._sent else self.ended_s) + saved_s

    def presses_s(self) -> float:
        """From when on a batch may preempt that a deadline does not let wait: a fixed time after the last one, in a run
        of SAVED gaps. Infinite where only ``opens_s`` counts."""
        runs = self.ended_s - self._begun_s < SAVED * self.least_s
        return math.inf if self._sent or not runs else self.ended_s + (self._sizes.fixed_s or 0.0)

    def sent(self, now: float) -> None:
        """A batch that preempts goes to the device."""
        self._follows = now < self.ended_s + self.least_s
        paid = max(0.0, now - self.ended_s) / max(self.seconds, 1e-9)
        self._owed = min(float(SAVED), max(0.0, self._owed - paid) + 1.0)
        self._sent += 1

    def ran(self, begin: float, end: float) -> None:
        """A batch that preempted has had the device from `begin` to `end`."""
        self._sent -= 1
        self._took_s = end - begin
        if not self._follows:
            self._begun_s = begin
        self.ended_s = end


def stretch(gap_s: float, short_s: float, *, deadlines: bool = True) -> float:
    """How many times as long as alone the long class may take in the long run, with short batches of at most `short_s`
    seconds, with `deadlines` that press or without. At first, SAVED - 1 such batches come on top."""
    return 1.0 + SAVED * deadlines + short_s / gap_s


class Guard:
    """Gives a share of long time to the prompt that has waited longest, whatever the order.

    A ledger in seconds of device time: a long batch without the oldest prompt earns it `share` of its time, one with it
    costs it the rest. While the ledger is positive the oldest goes first.

    Bound: of any long time L in which a prompt waits, at least `share` L - B goes to those that came before it or to
    itself, with B the longest long batch. So it has its first token after at most (A + B) / share of long time, A being
    the work of those prompts. With share 0 there is no bound. While the oldest is too late for its deadline the share
    is LATE of this one.
    """

    def __init__(self, share: float) -> None:
        """`share` (0..1) of the time of long batches."""
        self.share = share
        self.credit_s = self._delay_s = 0.0

    def due(self) -> bool:
        """Return True if the oldest prompt goes first."""
        return self.credit_s > 0.0

    def ran(self, seconds: float, *, oldest: bool, late: bool = False) -> None:
        """A long batch took the device so long. `oldest`: it held the prompt that has waited longest, first or whole.
        `late`: that one is too late for its deadline.

        What is earned and what is owed is bounded by one batch: a prompt that could not be placed does not come back
        with a claim to many batches, and neither does chance leave it in debt.
        """
        share = self.share * LATE if late else self.share
        delay_s, self._delay_s = self._delay_s, 0.0
        if oldest:
            self.credit_s = max(self.credit_s, 0.0) - (1.0 - share) * seconds
        else:
            seconds += delay_s
            self.credit_s = min(self.credit_s + share * seconds, seconds)

    def delayed(self, seconds: float) -> None:
        """Decode steps had the device so long: a batch without the oldest prompt has kept it waiting for them, too."""
        self._delay_s += seconds

    def none_waits(self) -> None:
        """No long work is left: nothing is carried over to the next arrival."""
        self.credit_s = self._delay_s = 0.0
