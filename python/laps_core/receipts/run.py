"""Batches and decode steps of a ledger, and causes that hold back waiting requests."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from laps_core.length import ClassName
from laps_core.receipts.receipt import Cause

LATE = 2.0
"""A step is marked as late if it took at least this many times its predicted time."""


class Run(msgspec.Struct, gc=False, kw_only=True):
    """A batch or a decode step on the device."""

    cls: ClassName | None = None
    """None: a decode step."""
    rids: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    """New tokens of each request."""
    more: int = 0
    """Number of short requests that ``rids`` leaves out."""
    more_tokens: int = 0
    """New tokens of these requests."""
    cut: str | None = None
    """Request ID of the prompt that has more chunks after this batch."""
    streams: int = 0
    """Streams that a decode step serves, or that have a row in a batch."""
    depth: int = 0
    """Number of batches that are paused while this batch runs."""
    layers: int = 0
    """Layers of a slice; 0 = the batch runs whole."""
    predicted_us: int | None = None
    """None: the latency model is not fitted."""
    begin_us: int
    end_us: int | None = None
    """None: not ended yet."""
    own_us: int = 0
    """Device time, without that of batches in its pauses."""

    @property
    def request_count(self) -> int:
        return len(self.rids) + self.more

    @property
    def new_tokens(self) -> int:
        return sum(self.tokens) + self.more_tokens

    @property
    def late(self) -> bool:
        """True if the batch took at least LATE times its predicted time."""
        return self.end_us is not None and bool(self.predicted_us) and self.own_us >= LATE * (self.predicted_us or 0)


class Hold(NamedTuple):
    """Cause that holds a class back, from `since_us` on."""

    since_us: int
    cause: Cause | None
    """None: the class is not held back, or no request of the class waits."""
    waits: bool
    """True if a request of the class waits."""


FREE = Hold(0, None, False)
