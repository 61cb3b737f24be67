"""Prompts between two of their chunks: SGLang's slot (``chunked_req``) holds the one whose chunk ran last, others are
parked beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Req = Any
"""A request of SGLang's."""


@dataclass(frozen=True, slots=True)
class InProgress:
    """Prompts between two of their chunks, where SGLang looks for a batch, or for the one prompt in the slot."""

    reqs: list[Req]

    @property
    def seqlen(self) -> int:
        """Tokens of all of them."""
        return sum(r.seqlen for r in self.reqs)

    @property
    def prefix_len(self) -> int:
        """Tokens that are prefilled already."""
        return sum(r.prefix_len for r in self.reqs)


class Chunked:
    """The parked prompts of one scheduler, and what is known of the one in the slot."""

    def __init__(self) -> None:
        self.parked: list[Req] = []
        self.unsent = False
        """The chunk that ran last was not sent yet."""
        self._aborted: list[Req] = []

    def in_progress(self, slot: Req | None) -> InProgress:
        """Prompts that are begun and not done, the one in the slot first."""
        return InProgress([r for r in (slot, *self.parked) if r is not None])

    def built(self, parked: list[Req], cut: Req | None) -> None:
        """A batch was built, after which `cut` goes on and has the slot; `parked` had no part in it."""
        self.parked, self.unsent = parked, cut is not None

    def take_unsent(self) -> bool:
        """Return True if the chunk that ran last was not sent yet; asked once."""
        unsent, self.unsent = self.unsent, False
        return unsent

    def keep(self, wanted: Callable[[Req], bool]) -> None:
        """Drop parked prompts that nobody wants any more."""
        self.parked = [r for r in self.parked if wanted(r)]

    def drop(self, req: Req) -> None:
        """Drop a parked prompt that has ended."""
        self.parked.remove(req)

    def take_parked(self) -> list[Req]:
        """Take all parked prompts: they begin anew."""
        parked, self.parked = self.parked, []
        return parked

    def abort(self, rid: str, *, every: bool) -> None:
        """Parked prompts with this prefix of an id, or all, end once it is safe."""
        self._aborted += [r for r in self.parked if every or r.rid.startswith(rid)]

    def aborted(self) -> list[Req]:
        """Return the requests aborted since the last call."""
        found, self._aborted = self._aborted, []
        return found
