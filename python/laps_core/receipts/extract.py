"""Data of a timeline, as they leave the scheduler: compact, for the scheduler has other things to do."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from laps_core.length import CLASSES, ClassName
from laps_core.receipts.ledger import Held, Ledger, Run
from laps_core.receipts.recent import Entry, Recent


class Extract(msgspec.Struct, frozen=True, kw_only=True):
    """The last seconds of one scheduler. Microseconds of its clock."""

    begin_us: int
    end_us: int
    epoch_s: float
    """Unix time at 0 of the clock."""
    runs: list[Run]
    pieces: list[tuple[int, int, int]]
    """Begin, end, and which of ``runs``: -1 = the device was idle."""
    held: dict[ClassName, list[Held]]
    entries: list[Entry]
    """Without their receipts."""
    dp_rank: int = 0


def extract(ledger: Ledger, recent: Recent, *, begin_us: int, end_us: int, epoch_s: float, dp_rank: int = 0) -> Extract:
    """Return what happened in a stretch."""
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
        held={cls: ledger.held(cls, begin_us, end_us) for cls in CLASSES},
        entries=[replace(entry, receipt=b"") for entry in recent.since(begin_us)],
        dp_rank=dp_rank,
    )
