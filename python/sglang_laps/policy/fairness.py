"""The bound on how long the long class may starve: a share of busy time."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_laps.policy.length import LONG, LengthClass


@dataclass(slots=True)
class Launch:
    """One batch on the device, to be settled when its time is known."""

    cls: LengthClass
    contended: bool
    charged_s: float
    spare: bool = False
    """The long class had it beyond its share (see ``catchup``)."""


class LongShare:
    """Keeps the long class at `share` (0..1) of the busy time in which both classes wait.

    A ledger in seconds of device time: while both wait, every batch earns the long class `share` of its time, and
    long batches spend theirs. The long class is owed a batch once what it earned pays for one, so a burst of short
    requests that ends sooner is served without a long chunk in its way. Time is what counts, never batches.

    Bound: while both wait, short batches take at most (1 - share) / share times the last long batch's time, plus one
    short batch, before a long one runs. With share 0 there is no bound.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.credit_s = 0.0
        self._in_flight_s = 0.0
        self._long_batch_s: float | None = None

    def owed(self) -> bool:
        """Whether the next batch belongs to the long class, both waiting."""
        earned = self.credit_s - self._in_flight_s
        if self.share <= 0.0 or earned <= 0.0:
            return False
        price = (1.0 - self.share) * (self._long_batch_s or 0.0)
        return earned >= price

    def launch(self, cls: LengthClass, *, contended: bool, spare: bool = False) -> Launch:
        """Note a batch sent to the device. `contended`: both classes had work when it was chosen.
        `spare`: the long class was not owed it.

        Its expected price is held back until it is settled: with two batches in flight the ledger would otherwise
        pay for the same turn twice.
        """
        charged = (1.0 - self.share) * (self._long_batch_s or 0.0) if contended and cls is LONG else 0.0
        self._in_flight_s += charged
        return Launch(cls, contended, charged, spare and cls is LONG)

    def settle(self, launch: Launch, seconds: float) -> None:
        """Enter the measured device time of a batch."""
        self._in_flight_s = max(0.0, self._in_flight_s - launch.charged_s)
        if launch.cls is LONG:
            self._long_batch_s = seconds
        if launch.spare:
            # It uses up what was earned, but leaves no debt: once short requests need all their time, the share holds.
            self.credit_s = min(self.credit_s, max(0.0, self.credit_s - (1.0 - self.share) * seconds))
        elif launch.contended:
            self.credit_s += self.share * seconds - (seconds if launch.cls is LONG else 0.0)

    def long_done(self) -> None:
        """No long work is left: nothing earned is carried over to the next arrival."""
        self.credit_s = 0.0
