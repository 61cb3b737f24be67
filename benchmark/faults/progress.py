"""One live line on a terminal; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

EVERY_S = 10.0
"""Between two lines where there is no terminal."""


class Progress:
    """Call it with what is going on, as often as you like."""

    def __init__(self, out: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._begin = clock()
        self._tty = out.isatty()
        self._last = -EVERY_S

    def __call__(self, text: str) -> None:
        now = self._clock() - self._begin
        if self._tty:
            self._out.write(f"\r\033[K[{now:5.0f} s] {text}")
        elif now - self._last >= EVERY_S:
            self._last = now
            self._out.write(f"[{now:5.0f} s] {text}\n")
        self._out.flush()

    def done(self) -> None:
        """Leave the line."""
        if self._tty:
            self._out.write("\n")
            self._out.flush()
