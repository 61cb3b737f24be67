"""``laps-patch status|apply|revert``: insert the LAPS lines into an installed sglang-router, or remove them.

The router's patches only insert lines, so that reverting them restores every byte. With ``--server``, the command
works on a series of corrections to an installed SGLang, which LAPS does not need.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_router_laps.patching.files import PatchError, find_root, read_version
from sglang_router_laps.patching.series import Series

PATCHES = Path(__file__).parent / "patches"
ROUTER = PATCHES / "sglang-router-0.3.2"
SERVER = PATCHES / "sglang-0.5.23"


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Exit status: 0 = done or nothing to do; 1 = refused, one line on stderr; 2 = bad flags."""
    parser = argparse.ArgumentParser(prog="laps-patch", description=__doc__)
    parser.add_argument("action", choices=["status", "apply", "revert"])
    parser.add_argument(
        "--root", type=Path, help="folder that holds the package, or a source checkout; else the installed package"
    )
    parser.add_argument(
        "--server",
        action="store_true",
        help="the corrections of SGLang itself, instead of the LAPS lines in the router",
    )
    args = parser.parse_args(argv)
    try:
        run(args.action, Series(SERVER if args.server else ROUTER), args.root)
    except PatchError as e:
        print(f"laps-patch: {e}", file=sys.stderr)
        return 1
    return 0


def run(action: str, series: Series, given: Path | None) -> None:
    """Apply, revert or check all files of ``series`` below ``given`` (None: the installed package), and print each
    file's state. Raises PatchError."""
    root = find_root(series.package, given)
    found = read_version(root / series.package)
    if action == "status":
        states = {
            path: series.state(root, path) if found == series.version else f"not {series.version}"
            for path in series.states
        }
    elif found != series.version:
        why = f"{series.distribution} is {found}, the patches are for {series.version}"
        raise PatchError(f"{why}; nothing was changed")
    else:
        done, changed = "patched" if action == "apply" else "restored", series.rewrite(root, apply=action == "apply")
        states = {path: done if path in changed else f"already {done}" for path in series.states}
    for path, state in states.items():
        print(f"{series.distribution} {found} {path}: {state}")


if __name__ == "__main__":
    sys.exit(main())
