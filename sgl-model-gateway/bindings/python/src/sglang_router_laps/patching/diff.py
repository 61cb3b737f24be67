"""Unified diffs: parsing, and applying or reverting them in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FILE = re.compile(rb"^\+\+\+ b/(\S+)\n")
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(Exception):
    """A diff cannot be read, or does not fit the text. The message is one line."""


@dataclass(frozen=True)
class Hunk:
    """Lines of a file, context included, and the lines that replace them."""

    line: int
    """Number of the first line in the file before the change, counted from 1."""
    new_line: int
    before: list[bytes]
    after: list[bytes]

    def reversed(self) -> Hunk:
        """Return the hunk that reverts this hunk."""
        return Hunk(self.new_line, self.line, self.after, self.before)


def parse(text: bytes) -> dict[str, list[Hunk]]:
    """Return the hunks by path, as the diff names the path. All other text is skipped. Raises DiffError."""
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    inside = False
    for line in text.splitlines(keepends=True):
        if file := _FILE.match(line):
            hunks = files.setdefault(file[1].decode(), [])
            inside = False
        elif (head := _HUNK.match(line)) and hunks is not None:
            # If a hunk has no lines on one side, the diff gives the number of the line before it on that side.
            at, new_at = int(head[1]) + (head[2] == b"0"), int(head[3]) + (head[4] == b"0")
            hunks.append(Hunk(at, new_at, [], []))
            inside = True
        elif inside and hunks and line[:1] in (b" ", b"-", b"+"):
            if line[:1] != b"+":
                hunks[-1].before.append(line[1:])
            if line[:1] != b"-":
                hunks[-1].after.append(line[1:])
        else:
            inside = False
    if not files or not all(files.values()):
        raise DiffError("no hunks")
    return files


def apply(text: bytes, hunks: list[Hunk], *, reverse: bool = False) -> bytes:
    """Return ``text`` with the hunks applied, or reverted. A hunk is applied where its old lines occur, at the nearest
    place if they occur several times. Raises DiffError if they do not occur."""
    lines = text.splitlines(keepends=True)
    shift = 0
    for hunk in [h.reversed() for h in hunks] if reverse else hunks:
        wanted, count = hunk.line - 1 + shift, len(hunk.before)
        places = [i for i in range(len(lines) - count + 1) if lines[i : i + count] == hunk.before]
        if not places:
            raise DiffError(f"the lines of hunk {hunk.line} are not there")
        place = min(places, key=lambda i: abs(i - wanted))
        lines[place : place + count] = hunk.after
        shift += place - wanted + len(hunk.after) - count
    return b"".join(lines)
