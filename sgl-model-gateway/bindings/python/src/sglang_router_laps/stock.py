"""The stock router's MiniLB, without importing all of SGLang.

Its module looks for a tracer in SGLang: that takes some 750 MB and ten seconds of every router process, and then fails
where SGLang has none there. Where it has none, the import fails at once instead.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def _has_tracer() -> bool:
    """Whether SGLang has the tracer that MiniLB imports, from the files alone."""
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
