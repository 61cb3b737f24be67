"""``laps-patch status|apply|revert``: put the LAPS seam into an installed sglang-router, or take it out.

The router's patches insert lines and do nothing else, so that taking them out again restores every byte. With
``--server``: a series of corrections to an installed SGLang, which LAPS does not need.
"""

from __future__ import annotations

import argparse
import re
import sys
from hashlib import sha256
from pathlib import Path

from sglang_router_laps.patching.files import PatchError, find_root, read_version, replace
from sglang_router_laps.patching.series import Series

PATCHES = Path(__file__).parent / "patches"
SERVER = PATCHES / "sglang-0.5.23"
_FILE = re.compile(rb"^\+\+\+ b/(\S+)", re.MULTILINE)
_HUNK = re.compile(rb"^@@ -(\d+),0 \+\d+(?:,\d+)? @@.*\n((?:\+.*\n)+)", re.MULTILINE)


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
        replace(file, text)
        return True


def main(argv: list[str] | None = None) -> int:
    """Entry point. 0: done or nothing to do; 1: refused, with one line on stderr; 2: bad flags."""
    parser = argparse.ArgumentParser(prog="laps-patch", description=__doc__)
    parser.add_argument("action", choices=["status", "apply", "revert"])
    parser.add_argument(
        "--root", type=Path, help="folder that holds the package, or a source checkout; else the installed package"
    )
    parser.add_argument(
        "--server", action="store_true", help="the corrections of SGLang itself, instead of the router's seam"
    )
    args = parser.parse_args(argv)
    try:
        if args.server:
            run_series(args.action, Series(SERVER), args.root)
            return 0
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
    else:
        check_version(patch, found)
        done = "patched" if action == "apply" else "restored"
        state = done if patch.rewrite(root, apply=action == "apply") else f"already {done}"
    print(f"{patch.distribution} {found} {patch.path}: {state}")


def run_series(action: str, series: Series, given: Path | None) -> None:
    """Do ``action`` for all files of a series, as ``run`` does for one. Raises PatchError."""
    root = find_root(series.package, given)
    found = read_version(root / series.package)
    if action == "status":
        states = {
            path: series.state(root, path) if found == series.version else f"not {series.version}"
            for path in series.states
        }
    else:
        check_version(series, found)
        done, changed = "patched" if action == "apply" else "restored", series.rewrite(root, apply=action == "apply")
        states = {path: done if path in changed else f"already {done}" for path in series.states}
    for path, state in states.items():
        print(f"{series.distribution} {found} {path}: {state}")


def check_version(patch: Patch | Series, found: str) -> None:
    """Raise PatchError unless the package is of the release that is patched."""
    if found != patch.version:
        raise PatchError(f"{patch.distribution} is {found}, the patches are for {patch.version}; nothing was changed")


if __name__ == "__main__":
    sys.exit(main())
