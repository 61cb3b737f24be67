"""Settings that keep SGLang's processes from importing modules that the tests do not need.

Imports take most of a server's start, in each of its three processes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

GPU = Path("/dev/nvidiactl")
NO_GPU = Path(__file__).parent / "no_gpu"
MORE_MODELS = "LAPS_MORE_MODELS" in os.environ
"""True if the models of ``more_models`` are tested, too."""
_LATE_MODULES = ("falcon_h1", "granitemoehybrid")
_MORE_MODULES = (
    *_LATE_MODULES,
    *("apertus", "arcee", "cohere2_moe", "commandr", "ernie4", "gemma", "gemma4_causal", "glm4_moe_lite"),
    *("gpt_bigcode", "gpt_j", "granite", "granitemoe", "hunyuan_v3", "laguna", "lfm2", "lfm2_moe", "mellum"),
    *("minicpm3", "minimax_m2", "ministral3", "mistral", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi"),
    *("phimoe", "qwen3_5_text", "stablelm", "starcoder2", "transformers"),
)
MODELS = (
    *("qwen2", "qwen2_eagle", "qwen2_moe", "qwen3", "qwen3_moe", "llama", "mixtral", "gemma2", "gemma3_causal", "glm4"),
    *("glm4_moe", "glm4_moe_nextn", "gpt_oss", "deepseek_v2", "deepseek_nextn", "llama_eagle3"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_next", "qwen3_next_mtp", "qwen3_5", "qwen3_5_mtp", "nemotron_h"),
    *("mimo_v2", "mimo_v2_nextn"),
    *(_MORE_MODULES if MORE_MODELS else ()),
)
"""Models that the tests serve, as SGLang names their modules."""
LATE_IMPORTS = ("nemotron_h", *_LATE_MODULES)
"""Models whose import sets up the platform and Prometheus, which each server must do itself."""
MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Parameters of glibc's ``mallopt``, by the environment variable that sets them at process start."""


def keep_memory(env: Mapping[str, str]) -> None:
    """Apply the variables of ``MALLOPT`` in ``env`` to this process, which has started already."""
    for name, parameter in MALLOPT.items():
        if name in env:
            ctypes.CDLL(None).mallopt(parameter, ctypes.c_int(min(int(env[name]), (1 << 31) - 1)))


def environment() -> dict[str, str]:
    """Return variables that make SGLang load only ``MODELS`` and, without a GPU, neither Inductor nor FlashInfer."""
    sglang = find_spec("sglang")
    roots = (sglang and sglang.submodule_search_locations) or []
    models = sorted(
        {path.stem for root in roots for path in Path(root, "srt", "models").glob("*.py")}.difference(MODELS)
    )
    found = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(models)}
    if not GPU.exists():
        found["TORCHDYNAMO_DISABLE"] = "1"
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(NO_GPU), os.environ.get("PYTHONPATH"))))
    return found
