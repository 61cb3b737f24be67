"""Files of an installed package: their location, their release, and the replacement of a file."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

CHECKOUTS = {"sglang_router": Path("sgl-model-gateway/bindings/python/src"), "sglang": Path("python")}
"""Path of a package's import root in a source checkout of SGLang."""

_VERSION = re.compile(r"""^__version__\s*=\s*(?:version\s*=\s*)?["']([^"']+)["']""", re.MULTILINE)


class PatchError(Exception):
    """A patch cannot be read, applied or reverted. The message is one line."""


def find_root(package: str, given: Path | None) -> Path:
    """Return the folder that holds ``package``, without importing it. Raises PatchError if it is not found."""
    if given is not None:
        for root in (given, given / CHECKOUTS.get(package, "")):
            if (root / package).is_dir():
                return root
        raise PatchError(f"--root: {given} holds no {package}")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise PatchError(f"{package} is not installed")
    return Path(spec.origin).parent.parent


def read_version(package: Path) -> str:
    """Return ``__version__`` of a package folder without importing the package; "unknown" if not found."""
    for file in (package / "version.py", package / "_version.py"):
        if file.is_file() and (found := _VERSION.search(file.read_text())):
            return found.group(1)
    return "unknown"


def replace(file: Path, text: bytes) -> None:
    """Replace the content of ``file`` atomically and keep its mode. Raises PatchError, and then changes nothing."""
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
