"""Entry points, which SGLang imports on every machine; the rest of this package only without an accelerator."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from sglang_laps.serve_help import show_flags_in_serve_help
from sglang_laps.support import refuse

from laps_emulate import ENV

PLATFORM = "laps_emulate.host.platform"


def activate() -> str | None:
    """Return the platform's dotted name, or None to stay out. Entry point of the group ``sglang.srt.platforms``."""
    show_flags_in_serve_help(sys.argv)
    if not _without_accelerator():
        return None
    # SGLang records a CUDA event before each early send.
    os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    return f"{PLATFORM}.HostPlatform"


def load() -> None:
    """Load the plugin. Entry point of the group ``sglang.srt.plugins``; runs once in every SGLang process.

    Ends the process with one line if a device should be emulated on another platform.
    """
    from sglang.srt.platforms import current_platform

    if type(current_platform).__module__ == PLATFORM:
        from laps_emulate import plugin

        plugin.load()
    elif os.environ.get(ENV, "").strip():
        refuse(f"{ENV}: devices are emulated on machines without a GPU only, on the platform laps_host")


def _without_accelerator() -> bool:
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or torch.cuda.is_available() or torch.xpu.is_available():
        return False
    mps = getattr(torch.backends, "mps", None)
    return not (mps and mps.is_available()) and not any(map(find_spec, ("torch_npu", "torch_musa", "torchada")))
