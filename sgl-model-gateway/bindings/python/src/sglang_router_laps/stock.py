"""The stock router's MiniLB, without importing all of SGLang.

MiniLB imports a tracer from SGLang. That import takes 750 MB and ten seconds per router process, and then fails if
SGLang has no such tracer. In that case this module makes the import fail at once.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def _has_tracer() -> bool:
    """Return True if the installed SGLang has the tracer that MiniLB imports, judged by its files alone."""
    spec = find_spec("sglang")
    return any((Path(p) / "srt/tracing/trace.py").exists() for p in (spec and spec.submodule_search_locations) or ())


if "sglang" in sys.modules or _has_tracer():
    from sglang_router import mini_lb
else:
    sys.modules["sglang"] = None  # type: ignore[assignment]
    try:
        from sglang_router import mini_lb
    finally:
        del sys.modules["sglang"]

__all__ = ["mini_lb"]
