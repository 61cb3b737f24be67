"""Insert-only patches: read from ``patches/``, put into files and taken out again."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(rb"^\+\+\+ b/(\S+)", re.MULTILINE)
_HUNK = re.compile(rb"^@@ -(\d+),0 \+\d+(?:,\d+)? @@.*\n((?:\+.*\n)+)", re.MULTILINE)


class PatchError(Exception):
    """A patch cannot be read, applied or reverted. The message is one line."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines that are inserted."""

    after: int
    """Line of the original after which they go (0 = at the top)."""
    lines: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """The change of one file of one release."""

    distribution: str
    version: str
    path: str
    """Below the folder that holds the import package."""
    before: str
    """sha256 of the released file, hexadecimal."""
    after: str
    """sha256 of the patched file, hexadecimal."""
    hunks: tuple[Hunk, ...]

    def apply(self, text: bytes) -> bytes:
        """The patched text of the released ``text``."""
        lines = text.splitlines(keepends=True)
        for hunk in reversed(self.hunks):
            lines[hunk.after : hunk.after] = hunk.lines
        return b"".join(lines)

    def revert(self, text: bytes) -> bytes:
        """The released text of the patched ``text``."""
        lines = text.splitlines(keepends=True)
        for hunk in self.hunks:
            # Taking hunks out from the top leaves the next one where the original had it.
            del lines[hunk.after : hunk.after + len(hunk.lines)]
        return b"".join(lines)

    def state(self, root: Path) -> str:
        """stock, patched, modified or missing."""
        file = root / self.path
        if not file.is_file():
            return "missing"
        return {self.before: "stock", self.after: "patched"}.get(sha256(file.read_bytes()), "modified")


def sha256(text: bytes) -> str:
    """Hexadecimal."""
    return hashlib.sha256(text).hexdigest()


def read_series(folder: Path) -> list[Patch]:
    """All patches of ``folder`` in their order. Raises PatchError."""
    names = [n for n in (folder / "series").read_text().split("\n") if n and not n.startswith("#")]
    return [_read(folder / name) for name in names]


def _read(file: Path) -> Patch:
    distribution, _, version = file.parent.name.rpartition("-")
    path, hunks = _parse(file)
    for line in (file.parent / "sha256").read_text().splitlines():
        before, after, name = line.split()
        if name == path:
            return Patch(distribution, version, path, before, after, tuple(hunks))
    raise PatchError(f"{file.name}: no sha256 for {path}")


def _parse(file: Path) -> tuple[str, list[Hunk]]:
    text = file.read_bytes()
    head, rest = _FILE.search(text), _HUNK.sub(b"", text).splitlines()
    if head is None or not all(line.startswith((b"--- ", b"+++ ")) for line in rest):
        raise PatchError(f"{file.name}: a hunk that does more than insert")
    hunks = [Hunk(int(m[1]), tuple(a[1:] for a in m[2].splitlines(keepends=True))) for m in _HUNK.finditer(text)]
    return head[1].decode(), hunks


def rewrite(root: Path, patches: Sequence[Patch], *, apply: bool) -> list[str]:
    """Apply or revert all ``patches`` below ``root``; returns the paths that changed.

    Each file changes at once or not at all, and a failure half-way puts the earlier ones back. Raises PatchError,
    before anything is written, when a file is neither as released nor as patched.
    """
    wanted, source = ("patched", "stock") if apply else ("stock", "patched")
    todo: list[tuple[Path, bytes, bytes]] = []
    for patch in patches:
        state = patch.state(root)
        if state == wanted:
            continue
        if state != source:
            raise PatchError(
                f"{patch.path} is {state}: not the file of {patch.distribution} {patch.version}; nothing was changed"
            )
        old = (root / patch.path).read_bytes()
        new = patch.apply(old) if apply else patch.revert(old)
        if sha256(new) != (patch.after if apply else patch.before):
            raise PatchError(f"{patch.path}: the result does not have the expected sha256; nothing was changed")
        todo.append((root / patch.path, old, new))
    written: list[tuple[Path, bytes]] = []
    try:
        for file, old, new in todo:
            _replace(file, new)
            written.append((file, old))
    except OSError as e:
        for file, old in written:
            _replace(file, old)
        raise PatchError(f"{e.filename}: {e.strerror}; nothing was changed") from None
    return [str(file.relative_to(root)) for file, _, _ in todo]


def _replace(file: Path, text: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, file.stat().st_mode & 0o7777)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
