"""Data of a timeline, in the compact form in which the scheduler sends them, so that this costs it little time."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from laps_core.length import CLASSES, ClassName
from laps_core.receipts.ledger import Ledger
from laps_core.receipts.recent import Entry, Recent
from laps_core.receipts.run import Hold, Run


class Extract(msgspec.Struct, frozen=True, kw_only=True):
    """Last seconds of one scheduler. Times are microseconds of the scheduler's clock."""

    begin_us: int
    end_us: int
    epoch_s: float
    """Unix time when the clock was 0."""
    runs: list[Run]
    pieces: list[tuple[int, int, int]]
    """Start, end, and index into ``runs``; -1 = the device was idle."""
    held: dict[ClassName, list[Hold]]
    entries: list[Entry]
    """Requests, without their receipts."""
    dp_rank: int = 0


def extract(ledger: Ledger, recent: Recent, *, begin_us: int, end_us: int, epoch_s: float, dp_rank: int = 0) -> Extract:
    """Return the timeline between `begin_us` and `end_us`."""
    runs, at = list[Run](), dict[int, int]()
    pieces: list[tuple[int, int, int]] = []
    for begin, end, run in ledger.pieces(begin_us, end_us):
        if run is None:
            pieces.append((begin, end, -1))
            continue
        if id(run) not in at:
            at[id(run)] = len(runs)
            runs.append(run)
        pieces.append((begin, end, at[id(run)]))
    return Extract(
        begin_us=begin_us,
        end_us=end_us,
        epoch_s=epoch_s,
        runs=runs,
        pieces=pieces,
        held={cls: ledger.holds_between(cls, begin_us, end_us) for cls in CLASSES},
        entries=[replace(entry, receipt=b"") for entry in recent.since(begin_us)],
        dp_rank=dp_rank,
    )
