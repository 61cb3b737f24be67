"""``laps-patch status|apply|revert``: put the LAPS seam into an installed sglang-router, or take it out."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from itertools import groupby
from pathlib import Path

from .patchset import Patch, PatchError, read_series, rewrite

PATCHES = Path(__file__).parent / "patches"
CHECKOUT = Path("sgl-model-gateway/bindings/python/src")
"""Where a source checkout of SGLang keeps the router's package."""

_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def main(argv: list[str] | None = None) -> int:
    """Entry point. 0: done or nothing to do; 1: refused, with one line on stderr; 2: bad flags."""
    parser = argparse.ArgumentParser(prog="laps-patch", description=__doc__)
    parser.add_argument("action", choices=["status", "apply", "revert"])
    parser.add_argument(
        "--root", type=Path, help="folder that holds sglang_router, or a source checkout; else the installed package"
    )
    args = parser.parse_args(argv)
    try:
        for (distribution, version), group in groupby(read_series(PATCHES), lambda p: (p.distribution, p.version)):
            patches = list(group)
            root = find_root(patches[0].path.split("/")[0], args.root)
            run(args.action, root, patches, distribution, version)
    except PatchError as e:
        print(f"laps-patch: {e}", file=sys.stderr)
        return 1
    return 0


def run(action: str, root: Path, patches: list[Patch], distribution: str, version: str) -> None:
    """Do ``action`` for the patches of one release and say what came of it. Raises PatchError."""
    found = read_version(root / patches[0].path.split("/")[0])
    if action == "status":
        for patch in patches:
            state = patch.state(root) if found == version else f"not {version}"
            print(f"{distribution} {found} {patch.path}: {state}")
        return
    if found != version:
        raise PatchError(f"{distribution} is {found}, the patches are for {version}; nothing was changed")
    changed = rewrite(root, patches, apply=action == "apply")
    done = "patched" if action == "apply" else "restored"
    for patch in patches:
        print(f"{distribution} {version} {patch.path}: {done if patch.path in changed else f'already {done}'}")


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
