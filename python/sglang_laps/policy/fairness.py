"""The bound on how long the long class may starve: a share of busy time."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_laps.policy.length import LONG, LengthClass


@dataclass(slots=True)
class Launch:
    """One batch on the device, to be settled when its time is known."""

    cls: LengthClass
    contended: bool
    """Both classes had work when it was chosen."""
    turn: bool
    """It was the turn of its class."""
    charged_s: float


class LongShare:
    """Keeps the long class at `share` (0..1) of the busy time in which both classes wait.

    A ledger in seconds of device time: while both wait, every batch earns the long class `share` of its time, and
    long batches spend theirs. The long class is owed a batch once what it earned pays for one, so a burst of short
    requests that ends sooner is served without a long chunk in its way. Time is what counts, never batches.

    Only turns count. A long batch that ran though it was not owed (no short request waited or could run, higher
    priority, time to spare) uses up what was earned but leaves no debt. A short batch that ran though a long one was
    owed (no memory for it, lower priority) earns nothing more. So neither class can pile up a claim while it has its
    way, or has no use for it.

    Bounds, with s = `share`, 0 < s < 1, n = most batches in flight (1; 2 in the overlap loop), L = time of the last
    long batch (``starves``) or of the longest (``runs``), S = time of the longest short batch:

    - starves: while both wait, short batches take at most 2 (1 - s) / s * L + n S before the long class is owed; the
      factor 2 only where the last long batch was longer than the one before it.
    - runs: while both wait, long batches that are owed take at most 2 n L + n s / (1 - s) * S in a row.

    With share 0 the long class is never owed; with share 1 always, once it has waited for a short batch.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.credit_s = 0.0
        self._in_flight_s = 0.0
        self._long_batch_s: float | None = None

    def owed(self) -> bool:
        """Whether the next batch belongs to the long class, both waiting."""
        earned = self.credit_s - self._in_flight_s
        return self.share > 0.0 and earned > 0.0 and earned >= self._price_s()

    def launch(self, cls: LengthClass, *, contended: bool) -> Launch:
        """Note a batch sent to the device. `contended`: both classes had work when it was chosen.

        Its expected price is held back until it is settled: with two batches in flight the ledger would otherwise
        pay for the same turn twice.
        """
        turn = self.owed() is (cls is LONG)
        charged = self._price_s() if contended and cls is LONG else 0.0
        self._in_flight_s += charged
        return Launch(cls, contended, turn, charged)

    def settle(self, launch: Launch, seconds: float) -> None:
        """Enter the measured device time of a batch."""
        self._in_flight_s = max(0.0, self._in_flight_s - launch.charged_s)
        if launch.cls is not LONG:
            if launch.contended and launch.turn:
                self.credit_s += self.share * seconds
            return
        self._long_batch_s = seconds
        floor_s = -self._price_s() if launch.contended and launch.turn else min(0.0, self.credit_s)
        self.credit_s = max(floor_s, self.credit_s - self._price_s(), -self._price_s())

    def long_done(self) -> None:
        """No long work is left: nothing earned is carried over to the next arrival."""
        self.credit_s = 0.0

    def _price_s(self) -> float:
        """What a long batch like the last one costs."""
        return (1.0 - self.share) * (self._long_batch_s or 0.0)
