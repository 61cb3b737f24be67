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

ENDS = ("q", "\x03")
"""Keys that end a program: q and Ctrl-C."""


@contextmanager
def pressed() -> Iterator[Callable[[float], str]]:
    """Yield a function that returns the key pressed within the given seconds; empty = none.

    Ctrl-C is read as a key, too (``\\x03``): an interrupt while a requesting thread holds a lock would leave it locked.
    """
    if not sys.stdin.isatty():
        yield _wait
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    mode = termios.tcgetattr(fd)
    mode[tty.CC][termios.VINTR] = os.fpathconf(fd, "PC_VDISABLE")
    termios.tcsetattr(fd, termios.TCSANOW, mode)
    try:
        yield lambda seconds: os.read(fd, 1).decode(errors="replace") if select.select([fd], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
