"""Hold on a rank's memory for its guarded prompt: it went first in a step, but did not start."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from laps_core.length import LONG, ClassName
from laps_core.policy.memory import MemoryHold


class FirstHold:
    """Hold on the other requests of one rank, which would take the memory that this prompt needs.

    A hold changes only what its rank offers, so the other ranks need not know. See ``MemoryHold`` for the bounds.
    """

    def __init__(self) -> None:
        self._memory = MemoryHold()
        self.first: Any = None
        """Waiting prompt that went first, and for which the classes in ``held`` stand back; None if there is none."""
        self.held: tuple[ClassName, ...] = ()
        """Classes of which no other request may start."""
        self._alone = False
        """True if it was last tried without other long prompts: only then does the builder tell if memory was short."""

    def update(self, now: float, waiting: Iterable[Any], *, lacking: bool) -> None:
        """Decide who stands back. Call in every round. ``waiting``: requests that have not started. ``lacking``: the
        first long prompt found too little memory at the last try."""
        if self.first is not None and all(req is not self.first for req in waiting):
            self.first = None
        lacks = self.first is not None and (lacking or not self._alone)
        # A rank does not know which of its work will free memory. The second hold stops short requests, too.
        self.held = self._memory.choose_held_classes(now, lacking=lacks, drains=LONG)
        if not self.held:
            self.first = None

    def record_picks(self, picked: Collection[Any], first: Any, begun: Sequence[Any]) -> None:
        """Record the batch that this rank will try. ``first``: the picked prompt that goes first, if one does."""
        if self.held:
            if any(req is self.first for req in picked):
                self._alone = not any(req is other for req in picked for other in begun)
        elif first is not None and all(req is not first for req in begun):
            self.first, self._alone = first, False
