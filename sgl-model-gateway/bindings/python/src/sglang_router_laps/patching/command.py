"""``laps-patch status|apply|revert``: put the LAPS seam into an installed sglang-router, or take it out.

A patch inserts lines into one file and does nothing else, so that taking them out again restores every byte.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).parent / "patches"
CHECKOUT = Path("sgl-model-gateway/bindings/python/src")
"""Where a source checkout of SGLang keeps the router's package."""

_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_FILE = re.compile(rb"^\+\+\+ b/(\S+)", re.MULTILINE)
_HUNK = re.compile(rb"^@@ -(\d+),0 \+\d+(?:,\d+)? @@.*\n((?:\+.*\n)+)", re.MULTILINE)


class PatchError(Exception):
    """A patch cannot be read, applied or reverted. The message is one line."""


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
    hunks: tuple[tuple[int, list[bytes]], ...]
    """The line of the original after which lines go (0 = at the top), and these lines."""

    @property
    def package(self) -> str:
        """The import package that the file is in."""
        return self.path.split("/")[0]

    def state(self, root: Path) -> str:
        """stock, patched, modified or missing."""
        file = root / self.path
        if not file.is_file():
            return "missing"
        return {self.before: "stock", self.after: "patched"}.get(sha256(file.read_bytes()), "modified")

    def rewrite(self, root: Path, *, apply: bool) -> bool:
        """Apply or revert it below ``root``, at once or not at all; whether there was anything to do.

        Raises PatchError, before anything is written, when the file is neither as released nor as patched.
        """
        state, file = self.state(root), root / self.path
        if state == ("patched" if apply else "stock"):
            return False
        if state in ("modified", "missing"):
            release = f"{self.distribution} {self.version}"
            raise PatchError(f"{self.path} is {state}: not the file of {release}; nothing was changed")
        lines = file.read_bytes().splitlines(keepends=True)
        # From the end on hunks go in where the original has them, and from the top on they come out again.
        for after, inserted in reversed(self.hunks) if apply else self.hunks:
            lines[after : after if apply else after + len(inserted)] = inserted if apply else []
        text = b"".join(lines)
        if sha256(text) != (self.after if apply else self.before):
            raise PatchError(f"{self.path}: the result does not have the expected sha256; nothing was changed")
        try:
            _replace(file, text)
        except OSError as e:
            raise PatchError(f"{e.filename}: {e.strerror}; nothing was changed") from None
        return True


def sha256(text: bytes) -> str:
    """Hexadecimal."""
    return hashlib.sha256(text).hexdigest()


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


def read_patch(file: Path) -> Patch:
    """The patch in ``file``, which lies in the folder of its release. Raises PatchError."""
    text = file.read_bytes()
    head, rest = _FILE.search(text), _HUNK.sub(b"", text).splitlines()
    if head is None or not all(line.startswith((b"--- ", b"+++ ")) for line in rest):
        raise PatchError(f"{file.name}: a hunk that does more than insert")
    path = head[1].decode()
    hunks = ((int(m[1]), [line[1:] for line in m[2].splitlines(keepends=True)]) for m in _HUNK.finditer(text))
    distribution, _, version = file.parent.name.rpartition("-")
    for line in (file.parent / "sha256").read_text().splitlines():
        before, after, name = line.split()
        if name == path:
            return Patch(distribution, version, path, before, after, tuple(hunks))
    raise PatchError(f"{file.name}: no sha256 for {path}")


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
            run(args.action, read_patch(PATCHES / name), args.root)
    except PatchError as e:
        print(f"laps-patch: {e}", file=sys.stderr)
        return 1
    return 0


def run(action: str, patch: Patch, given: Path | None) -> None:
    """Do ``action`` for one patch, below ``given`` if that is given, and say what came of it. Raises PatchError."""
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
    """The folder that holds ``package``. Raises PatchError when there is none."""
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
    """``__version__`` of a package folder, read without importing it; "unknown" when it says none."""
    file = package / "version.py"
    found = _VERSION.search(file.read_text()) if file.is_file() else None
    return found.group(1) if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
