"""How a long class that is behind catches up while short requests come all the time. Beyond the paper."""

from __future__ import annotations

from sglang_laps.policy.length import LONG, SHORT, LengthClass

_KEPT = 0.9
"""What a long batch leaves of the weight of those before it."""


class CatchUp:
    """Lets the long class run beyond its share: a chunk after each short batch, until it is no longer behind.

    Short first alone wastes the device. Short requests that come faster than a step's fixed cost fill it with small
    batches, and the long class is left with its floor even where fuller batches would leave time for both. A long chunk
    between two short batches fills the next one; a short request waits for one chunk, or, where two batches are in
    flight (the overlap loop), for the one that runs when it comes and the one after the short batch behind that. Where
    the short requests need more than one batch, they are behind themselves, and the share decides.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._after_short = False
        self._tokens = self._seconds = 0.0

    def due(self, waited_s: float, new_tokens: int, *, shorts_fit: bool) -> bool:
        """Whether a long chunk goes next.

        waited_s, new_tokens: of the first in line. It is behind once it has waited longer than it would if it were
        alone in its class and had no more than the share: its work / share. shorts_fit: one batch holds all short
        requests that wait.
        """
        if not (shorts_fit and self._after_short and self._share and self._tokens):
            return False
        return waited_s * self._share > new_tokens * self._seconds / self._tokens

    def launched(self, cls: LengthClass) -> None:
        """A batch of this class was sent to the device."""
        self._after_short = cls is SHORT

    def measured(self, cls: LengthClass, tokens: int, seconds: float) -> None:
        """A batch with this many new tokens took the device so long."""
        if cls is LONG:
            # Sums that fade: the last chunk of a prompt may be a few tokens and cost a whole step.
            self._tokens = _KEPT * self._tokens + tokens
            self._seconds = _KEPT * self._seconds + seconds
