"""The guard: a share of long time goes to the prompt that has waited longest. Beyond the paper."""

from __future__ import annotations

LATE = 0.1
"""Share left to a prompt that is too late for its deadline: it ends, but others can still be in time."""


class Guard:
    """Least work first starves the largest prompt; the guard does not let it.

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
            self.credit_s = max(self.credit_s - (1.0 - share) * seconds, -(1.0 - share) * seconds)
        else:
            seconds += delay_s
            self.credit_s = min(self.credit_s + share * seconds, seconds)

    def delayed(self, seconds: float) -> None:
        """Decode steps had the device so long: a batch without the oldest prompt has kept it waiting for them, too."""
        self._delay_s += seconds

    def none_waits(self) -> None:
        """No long work is left: nothing is carried over to the next arrival."""
        self.credit_s = self._delay_s = 0.0
