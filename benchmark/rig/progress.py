"""Progress messages with the time since the start."""

from __future__ import annotations

import contextlib
import sys
import time

EVERY_S = 10.0
"""Time between two lines of a live display without a terminal (seconds)."""


class Progress:
    """Progress output: one line per call, or one ``live`` line that is updated."""

    def __init__(self, *, live: bool = False) -> None:
        self._live = live
        self._out = sys.stderr if live else sys.stdout
        self._tty = live and self._out.isatty()
        self._begin = time.monotonic()
        self._last = -EVERY_S
        self._open = False

    def __call__(self, text: str) -> None:
        now = time.monotonic() - self._begin
        if self._live and not self._tty:
            if now - self._last < EVERY_S:
                return
            self._last = now
        self._open = self._tty
        line = f"[{now:5.0f} s] {text}"
        with contextlib.suppress(BrokenPipeError):
            self._out.write(f"\r\033[K{line}" if self._tty else f"{line}\n")
            self._out.flush()

    def done(self) -> None:
        """End a live line."""
        if self._open:
            self._out.write("\n")
            self._out.flush()
        self._open = False
