"""Series of patches for an installed package: each file has either all of its patches or none."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import whatthepatch
from whatthepatch.exceptions import WhatThePatchException

from sglang_router_laps.patching.files import PatchError, replace

UPSTREAM = "python/"
"""Import root in SGLang's source checkout: the paths in SGLang's patches start with it."""


class Series:
    """Patches for one release, in their order."""

    def __init__(self, folder: Path) -> None:
        """``folder`` has the name of the release. Its file ``series`` lists the patches; its file ``sha256`` lists the
        changed files with their hashes before and after. Raises PatchError."""
        self.distribution, _, self.version = folder.name.rpartition("-")
        self.patches = [(name, _parse((folder / name).read_text())) for name in (folder / "series").read_text().split()]
        """Name of each patch, with its changes by path below the import root."""
        self.states: dict[str, dict[str, str]] = {}
        """State of each file: path -> sha256 of its content (hexadecimal) -> state."""
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
        """Apply or revert all patches below ``root``. Return the paths of the changed files.

        Raises PatchError, before anything is written, if a file is neither as released nor as patched. If a write
        fails, the files written so far are restored.
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
        for name, changes in reversed(self.patches) if reverse else self.patches:
            try:
                text = change(text, changes, path, reverse=reverse)
            except WhatThePatchException as e:
                raise PatchError(f"{name}: {path}: {e}; nothing was changed") from None
        return text


def change(text: bytes, changes: Mapping[str, Any], path: str, *, reverse: bool = False) -> bytes:
    """Return the text of the file at ``path`` with the changes of one patch applied, or reverted. Raises
    WhatThePatchException."""
    if path not in changes:
        return text
    lines = whatthepatch.apply_diff(changes[path], text.decode(), reverse=reverse)
    return "".join(f"{line}\n" for line in lines).encode()


def _parse(patch: str) -> dict[str, Any]:
    return {d.header.new_path.removeprefix(UPSTREAM): d for d in whatthepatch.parse_patch(patch)}
