"""Pieces measured one after the other, each within a time limit; pieces measured before are kept."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.results import Piece
from benchmark.results.machine import commit, machine
from benchmark.results.steps import Collected
from benchmark.rig import Progress

PIECE_S = 240.0
"""Time limit of one piece."""


class TookTooLongError(SystemExit):
    """A piece exceeded its time limit. A SystemExit, because uvloop passes on no other exception of a signal handler
    except KeyboardInterrupt."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TookTooLongError in the main thread if the block takes longer than ``seconds``."""

    def ring(*_: Any) -> None:
        raise TookTooLongError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Kit:
    """The pieces of one folder."""

    def __init__(
        self, out: Path, say: Progress, wanted: Sequence[str], minutes: float, argv: Sequence[str] | None
    ) -> None:
        """Set the pieces to measure (`wanted`), and the time after which no further piece starts (`minutes`)."""
        self.out, self.say, self._wanted, self._argv = out, say, wanted, argv
        self._ends = time.monotonic() + 60.0 * minutes
        self.missing: dict[str, str] = {}
        """Wanted piece -> reason why it is missing."""

    def wants(self, name: str) -> bool:
        """Return True if a piece is wanted and was not measured yet on this machine with this commit."""
        if name not in self._wanted or name in self.missing:
            return False
        try:
            found = Piece.read(self.out / f"gpu-{name}")
        except (OSError, ValueError, TypeError, KeyError):
            return True
        return (found.commit, found.machine) != (commit(), json.loads(json.dumps(machine())))

    def measure(self, name: str, make: Callable[[], tuple[Piece, Path]]) -> None:
        """Measure a piece if it is wanted. `make`: returns the piece with the folder of its pictures. A failure is
        recorded and does not stop the other pieces."""
        if not self.wants(name):
            return
        if time.monotonic() > self._ends:
            self.miss([name], "no time was left for it")
            return
        self.say(f"{name}: starts")
        try:
            with limited(PIECE_S):
                piece, left = make()
        except (Exception, TookTooLongError) as e:  # one failed piece must not stop the others on this machine
            self.miss([name], f"{type(e).__name__}: {e}")
            return
        piece.name = f"gpu-{name}"
        folder = self.out / piece.name
        piece.save_and_print(folder, "./run gpu", self._argv)
        for picture in piece.pictures if left != folder else ():
            shutil.copy(left / picture, folder)

    def miss(self, names: Sequence[str], why: str) -> None:
        """Record the reason why these pieces are missing."""
        for name in names:
            self.missing[name] = why.split("\n", 1)[0][:300]
            self.say(f"{name}: {self.missing[name]}")

    def collected(self, names: Sequence[str]) -> Collected:
        """Return the measured pieces in the order of ``names``, and the missing ones with reasons."""
        found = Collected({}, {})
        for name in names:
            leaf = f"gpu-{name}"
            found.add(leaf, self.out, self.missing.get(name, "not measured"))
            if leaf in found.pieces and name in self.missing:
                found.missing[leaf] = f"of an earlier run; this time: {self.missing[name]}"
        return found
