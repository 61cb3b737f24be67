"""Build wheel and source archive of this checkout, without the network: python .ci/release.py FOLDER

Both are built from a copy of the tree, without files of earlier builds. All times in the wheel are the time of the last
commit, so the same tree gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PARTS = ("python", "sgl-model-gateway", "patches", "pyproject.toml", "constraints.txt")
TEXTS = ("README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")
# Read `argv` first: the backend changes it.
BACKEND = (
    "import sys; from setuptools import build_meta as b; d = sys.argv[1]; print(b.build_sdist(d), b.build_wheel(d))"
)


def build(out: Path) -> list[Path]:
    """Build source archive and wheel in `out` and return their paths. Raises CalledProcessError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "tree")
        copy.mkdir()
        for name in (*PARTS, *TEXTS):
            if (REPO / name).is_dir():
                shutil.copytree(REPO / name, copy / name, symlinks=True, ignore=LEFT_OUT)
            else:
                shutil.copy2(REPO / name, copy / name)
        env = {"SOURCE_DATE_EPOCH": committed(), **os.environ}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", BACKEND, out.resolve()],
            cwd=copy, env=env, check=True, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
    return [out / name for name in done.stdout.split()[-2:]]


def committed() -> str:
    """Return the time of the last commit (Unix seconds); without a commit 1980, the earliest time in a wheel."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=REPO, text=True, capture_output=True, check=False)
    return done.stdout.strip() or "315532800"


if __name__ == "__main__":
    for path in build(Path(sys.argv[1])):
        print(path)
