"""Prompts between two of their chunks. SGLang's slot (``chunked_req``) holds the prompt whose chunk ran last; all other
prompts in progress are parked here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Req = Any
"""SGLang's request."""


@dataclass(frozen=True, slots=True)
class InProgress:
    """Prompts between two of their chunks, given to SGLang instead of a batch or of the one prompt in the slot."""

    reqs: list[Req]

    @property
    def seqlen(self) -> int:
        """Return the total tokens of these prompts."""
        return sum(r.seqlen for r in self.reqs)

    @property
    def prefix_len(self) -> int:
        """Return the total tokens that are already prefilled."""
        return sum(r.prefix_len for r in self.reqs)


class Chunked:
    """Parked prompts of one scheduler, and the state of the prompt in the slot."""

    def __init__(self) -> None:
        self.parked: list[Req] = []
        self.unsent = False
        """True if the chunk that ran last was not sent yet."""
        self._aborted: list[Req] = []

    def in_progress(self, slot: Req | None) -> InProgress:
        """Return the prompts that have started and are not done, the prompt in the slot first."""
        return InProgress([r for r in (slot, *self.parked) if r is not None])

    def record_build(self, parked: list[Req], cut: Req | None) -> None:
        """Record a built batch: `cut` goes on afterwards and has the slot; prompts in `parked` are not in the batch."""
        self.parked, self.unsent = parked, cut is not None

    def take_unsent(self) -> bool:
        """Return True if the chunk that ran last was not sent yet, and count that chunk as sent."""
        unsent, self.unsent = self.unsent, False
        return unsent

    def abort(self, rid: str, *, every: bool) -> None:
        """Mark parked prompts whose id starts with `rid`, or all, as aborted; they end as soon as that is safe."""
        self._aborted += [r for r in self.parked if every or r.rid.startswith(rid)]

    def aborted(self) -> list[Req]:
        """Return the requests marked as aborted since the last call."""
        found, self._aborted = self._aborted, []
        return found
