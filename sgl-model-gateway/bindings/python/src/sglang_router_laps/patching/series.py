"""A series of changes to an installed package: each file as released, or with all of them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from sglang_router_laps.patching import diff
from sglang_router_laps.patching.files import PatchError, replace

UPSTREAM = "python/"
"""Import root in SGLang's source checkout: paths of the patches begin with it."""


class Series:
    """Patches of one release, in their order."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is named after the release; its ``series`` lists the patches, ``sha256`` the files. Raises
        PatchError."""
        self.distribution, _, self.version = folder.name.rpartition("-")
        self.hunks: list[tuple[str, dict[str, list[diff.Hunk]]]] = []
        """Per patch its name, and its hunks by path below the import root."""
        for name in (folder / "series").read_text().split():
            try:
                found = diff.parse((folder / name).read_bytes())
            except diff.DiffError as e:
                raise PatchError(f"{name}: {e}") from None
            self.hunks.append((name, {path.removeprefix(UPSTREAM): hunks for path, hunks in found.items()}))
        self.states: dict[str, dict[str, str]] = {}
        """By path: state by sha256 of the file, hexadecimal."""
        for line in (folder / "sha256").read_text().splitlines():
            before, after, path = line.split()
            self.states[path] = {before: "stock", after: "patched"}
        self.package = next(iter(self.states)).split("/")[0]

    def state(self, root: Path, path: str) -> str:
        """Return a file's state: stock, patched, modified or missing."""
        file = root / path
        return self._state_of(path, file.read_bytes()) if file.is_file() else "missing"

    def _state_of(self, path: str, text: bytes) -> str:
        return self.states[path].get(sha256(text).hexdigest(), "modified")

    def rewrite(self, root: Path, *, apply: bool) -> list[str]:
        """Apply or revert all patches below ``root``. Returns the paths of changed files.

        Raises PatchError, before anything is written, when a file is neither as released nor as patched. Where a write
        fails, the files written so far are put back.
        """
        wanted = "patched" if apply else "stock"
        texts: dict[str, tuple[bytes, bytes]] = {}
        for path in self.states:
            state = self.state(root, path)
            if state in ("modified", "missing"):
                release = f"{self.distribution} {self.version}"
                raise PatchError(f"{path} is {state}: not the file of {release}; nothing was changed")
            if state != wanted:
                old = (root / path).read_bytes()
                texts[path] = old, self._changed(path, old, reverse=not apply)
                if self._state_of(path, texts[path][1]) != wanted:
                    raise PatchError(f"{path}: the result does not have the expected sha256; nothing was changed")
        done: list[str] = []
        try:
            for path, (_, new) in texts.items():
                replace(root / path, new)
                done.append(path)
        except PatchError:
            for path in done:
                replace(root / path, texts[path][0])
            raise
        return done

    def _changed(self, path: str, text: bytes, *, reverse: bool) -> bytes:
        for name, files in reversed(self.hunks) if reverse else self.hunks:
            try:
                text = diff.apply(text, files.get(path, []), reverse=reverse)
            except diff.DiffError as e:
                raise PatchError(f"{name}: {path}: {e}; nothing was changed") from None
        return text
