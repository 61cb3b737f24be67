"""Keys that are pressed in a terminal, without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def pressed() -> Iterator[Callable[[float], str]]:
    """Yield a function that returns the key pressed within so many seconds; empty = none. Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield _wait
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: os.read(fd, 1).decode(errors="replace") if select.select([fd], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
