"""``laps-patch status|apply|revert``: put the LAPS seam into an installed sglang-router, or take it out.

A patch inserts lines into one file and does nothing else, so that taking them out again restores every byte.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
from hashlib import sha256
from pathlib import Path

PATCHES = Path(__file__).parent / "patches"
CHECKOUT = Path("sgl-model-gateway/bindings/python/src")
"""Path of the router's package in a source checkout of SGLang."""

_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_FILE = re.compile(rb"^\+\+\+ b/(\S+)", re.MULTILINE)
_HUNK = re.compile(rb"^@@ -(\d+),0 \+\d+(?:,\d+)? @@.*\n((?:\+.*\n)+)", re.MULTILINE)


class PatchError(Exception):
    """A patch cannot be read, applied or reverted. The message is one line."""


class Patch:
    """Insertions into one file of one release."""

    def __init__(self, file: Path) -> None:
        """``file`` lies in the folder of its release, beside the hashes. Raises PatchError."""
        text = file.read_bytes()
        head, rest = _FILE.search(text), _HUNK.sub(b"", text).splitlines()
        if head is None or not all(line.startswith((b"--- ", b"+++ ")) for line in rest):
            raise PatchError(f"{file.name}: a hunk that does more than insert")
        self.path = head[1].decode()
        """Path below the folder that holds the import package."""
        self.package = self.path.split("/")[0]
        self.distribution, _, self.version = file.parent.name.rpartition("-")
        self._states: dict[str, str] = {}
        """State by sha256 of the file, hexadecimal."""
        for line in (file.parent / "sha256").read_text().splitlines():
            before, after, path = line.split()
            if path == self.path:
                self._states = {before: "stock", after: "patched"}
        if not self._states:
            raise PatchError(f"{file.name}: no sha256 for {self.path}")
        self._hunks = [(int(m[1]), re.findall(rb"^\+(.*\n)", m[2], re.MULTILINE)) for m in _HUNK.finditer(text)]
        """Line of the original after which to insert (0 = at the top), and the lines to insert."""

    def state(self, root: Path) -> str:
        """Return the file's state: stock, patched, modified or missing."""
        file = root / self.path
        return self._state_of(file.read_bytes()) if file.is_file() else "missing"

    def _state_of(self, text: bytes) -> str:
        return self._states.get(sha256(text).hexdigest(), "modified")

    def rewrite(self, root: Path, *, apply: bool) -> bool:
        """Apply or revert the patch below ``root``, atomically. Returns False if there was nothing to do.

        Raises PatchError, before anything is written, when the file is neither as released nor as patched.
        """
        state, file, wanted = self.state(root), root / self.path, "patched" if apply else "stock"
        if state == wanted:
            return False
        if state in ("modified", "missing"):
            release = f"{self.distribution} {self.version}"
            raise PatchError(f"{self.path} is {state}: not the file of {release}; nothing was changed")
        lines = file.read_bytes().splitlines(keepends=True)
        # Line numbers are the original's: insert from the end on, remove from the top on.
        for after, inserted in reversed(self._hunks) if apply else self._hunks:
            lines[after : after if apply else after + len(inserted)] = inserted if apply else []
        text = b"".join(lines)
        if self._state_of(text) != wanted:
            raise PatchError(f"{self.path}: the result does not have the expected sha256; nothing was changed")
        new = file.with_name(f".{file.name}.new")
        try:
            with new.open("wb") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            shutil.copymode(file, new)
            os.replace(new, file)
        except OSError as e:
            raise PatchError(f"{e.filename}: {e.strerror}; nothing was changed") from None
        finally:
            new.unlink(missing_ok=True)
        return True


def main(argv: list[str] | None = None) -> int:
    """Entry point. 0: done or nothing to do; 1: refused, with one line on stderr; 2: bad flags."""
    parser = argparse.ArgumentParser(prog="laps-patch", description=__doc__)
    parser.add_argument("action", choices=["status", "apply", "revert"])
    parser.add_argument(
        "--root", type=Path, help="folder that holds sglang_router, or a source checkout; else the installed package"
    )
    args = parser.parse_args(argv)
    try:
        for name in (PATCHES / "series").read_text().split():
            run(args.action, Patch(PATCHES / name), args.root)
    except PatchError as e:
        print(f"laps-patch: {e}", file=sys.stderr)
        return 1
    return 0


def run(action: str, patch: Patch, given: Path | None) -> None:
    """Do ``action`` for one patch, below ``given`` if that is set, and print the result. Raises PatchError."""
    root = find_root(patch.package, given)
    found = read_version(root / patch.package)
    if action == "status":
        state = patch.state(root) if found == patch.version else f"not {patch.version}"
    elif found != patch.version:
        raise PatchError(f"{patch.distribution} is {found}, the patches are for {patch.version}; nothing was changed")
    else:
        done = "patched" if action == "apply" else "restored"
        state = done if patch.rewrite(root, apply=action == "apply") else f"already {done}"
    print(f"{patch.distribution} {found} {patch.path}: {state}")


def find_root(package: str, given: Path | None) -> Path:
    """Return the folder that holds ``package``. Raises PatchError when there is none."""
    if given is not None:
        for root in (given, given / CHECKOUT):
            if (root / package).is_dir():
                return root
        raise PatchError(f"--root: {given} holds no {package}")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise PatchError(f"{package} is not installed")
    return Path(spec.origin).parent.parent


def read_version(package: Path) -> str:
    """Return ``__version__`` of a package folder, read without importing it; "unknown" if there is none."""
    file = package / "version.py"
    found = _VERSION.search(file.read_text()) if file.is_file() else None
    return found.group(1) if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
