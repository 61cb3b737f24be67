"""Pieces measured one after the other, each within a time limit; pieces measured before are kept."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.results import Piece
from benchmark.results.machine import commit, machine
from benchmark.results.steps import Collected
from benchmark.rig import Progress

PIECE_S = 240.0


class TookTooLongError(SystemExit):
    """A piece exceeded its time limit. A SystemExit, because uvloop passes on no other exception of a signal handler
    except KeyboardInterrupt."""


def took_too_long(*_: Any) -> None:
    """Raise TookTooLongError; handler of the alarm that ends a piece."""
    raise TookTooLongError(f"took longer than {PIECE_S:.0f} s")


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
            found = Piece.read(self.folder(name))
        except (OSError, ValueError, TypeError, KeyError):
            return True
        return (found.commit, found.machine) != (commit(), json.loads(json.dumps(machine())))

    def folder(self, name: str) -> Path:
        return self.out / f"gpu-{name}"

    def measure(self, name: str, make: Callable[[], Piece]) -> None:
        """Measure a piece with ``make`` if it is wanted. A failure is recorded and does not stop the other pieces."""
        if not self.wants(name):
            return
        if time.monotonic() > self._ends:
            self.miss([name], "no time was left for it")
            return
        self.say(f"{name}: starts")
        signal.signal(signal.SIGALRM, took_too_long)
        signal.setitimer(signal.ITIMER_REAL, PIECE_S)
        try:
            piece = make()
        except (Exception, TookTooLongError) as e:  # one failed piece must not stop the others on this machine
            self.miss([name], f"{type(e).__name__}: {e}")
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        piece.name = self.folder(name).name
        piece.save_and_print(self.folder(name), "./run gpu", self._argv)

    def miss(self, names: Sequence[str], why: str) -> None:
        """Record the reason why these pieces are missing."""
        for name in names:
            self.missing[name] = why.split("\n", 1)[0][:300]
            self.say(f"{name}: {self.missing[name]}")

    def collected(self, names: Sequence[str]) -> Collected:
        """Return the measured pieces in the order of ``names``, and the missing ones with reasons."""
        found = Collected({}, {self.folder(name).name: why for name, why in self.missing.items()})
        for name in names:
            found.add(self.folder(name).name, self.out, self.missing.get(name, "not measured"))
        return found
