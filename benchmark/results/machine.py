"""Machine, package versions and commit that a result was measured with."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import psutil

from benchmark.rig import REPO

PACKAGES = (
    "sglang", "sglang-kernel", "sglang-router", "sglang-laps", "torch", "triton", "transformers",
    "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13",
)  # fmt: skip


def machine() -> dict[str, str | int | float]:
    """Return processor, cores, memory (GiB), system, and the GPUs with their driver, if any."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        name = next((x.split(":", 1)[1].strip() for x in f if x.startswith("model name")), name)
    gpus = _gpus()
    return {
        **({"gpus": gpus} if gpus else {}),
        "cpu": name,
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _gpus() -> str:
    ask = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not shutil.which(ask[0]):
        return ""
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    return "; ".join(done.stdout.split("\n")).strip("; ") if done.returncode == 0 else ""


def versions() -> dict[str, str]:
    """Return the installed versions of the measured packages."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str:
    """Return the short hash of the checked-out commit, with a plus if Python files differ from it; empty without
    git."""
    changed = ("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    try:
        head, files = (
            subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=False).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), changed)
        )
    except OSError:
        return ""
    return head and head + ("+" if files else "")
