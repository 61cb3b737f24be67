"""Cheap copy of the installed SGLang: files that patches touch are copied, all other files are symbolic links."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

spec = importlib.util.find_spec("sglang")
assert spec is not None
assert spec.origin is not None
SITE = Path(spec.origin).parent.parent
"""Folder that holds the installed SGLang."""


def copy_package(root: Path, touched: Iterable[str]) -> Path:
    """Make a copy of SGLang in the import root ``root`` and return ``root``. ``touched``: files to copy, below it."""
    _link(root, SITE, "", set(touched) | {"sglang/version.py", "sglang/_version.py"})
    return root


def _link(to: Path, origin: Path, below: str, touched: set[str]) -> None:
    """Make one folder: copy touched files, recurse into folders with touched files, link everything else."""
    to.mkdir(parents=True, exist_ok=True)
    names = ["sglang"] if not below else [entry.name for entry in os.scandir(origin)]
    for name in names:
        path = f"{below}/{name}".lstrip("/")
        if path in touched:
            shutil.copy2(origin / name, to / name)
        elif any(file.startswith(path + "/") for file in touched):
            _link(to / name, origin / name, path, touched)
        elif name == "__pycache__":
            _link_compiled(to / name, origin / name, below, touched)
        else:
            (to / name).symlink_to(origin / name)


def _link_compiled(to: Path, origin: Path, below: str, touched: set[str]) -> None:
    """Link compiled modules, except those of touched files."""
    to.mkdir()
    for entry in os.scandir(origin):
        if f"{below}/{entry.name.split('.')[0]}.py" not in touched:
            (to / entry.name).symlink_to(entry.path)
