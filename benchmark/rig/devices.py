"""Devices: server arguments and a model for each kind of machine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laps_core.config import LapsConfig
from laps_emulate.spec import DeviceSpec

from benchmark.rig import model, servers
from benchmark.rig.variants import DUAL, GRAPHS, LAPS, STOCK, Variant

CPU, CUDA = "cpu", "cuda"
EMULATED = "emulated:"
"""Prefix of a device name whose rest is a value for --laps-emulate."""
POOL_TOKENS = 4 << 20
"""KV pool of a prefill server (tokens), large enough that no prefix of a benchmark is evicted."""
NORMAL_LOOP = "--disable-overlap-schedule"
MODELS = model.REPO / "out" / "models"
PREFIXES = model.REPO / "benchmark" / "rig" / "prefixes"
"""Folder of the plugin with which servers keep prefixes without a decode server, and hold histories not computed."""
CPU_SHAPE = model.SLICED
CUDA_SHAPE = "8B"


def with_path(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment with ``folder`` first in PYTHONPATH."""
    path = env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), path)))}


@dataclass(frozen=True)
class Device:
    """One kind of machine."""

    name: str
    args: tuple[str, ...]
    """Arguments of every server."""
    chunk: int
    """Default --chunked-prefill-size (tokens)."""
    longest: int
    """Longest prompt of a load (tokens)."""
    variants: tuple[str, ...]
    """Variants compared by default."""
    vocabulary: tuple[int, int]
    """Range of the token ids in prompts: [low, high)."""
    server_gib: float
    """Memory of each server (GiB): GPU memory on CUDA, else memory of the machine."""
    layers: int
    checkpoint: Callable[[], Path]
    what: str
    env: dict[str, str] = field(default_factory=dict)
    start_s: float = 240.0
    """Time limit for a server's start (seconds)."""
    at_once: bool = False
    """True if servers start at the same time. By default not on a CPU, where each start keeps one core busy."""
    sleeps: bool = True
    """True if idle schedulers sleep. Ranks of a group must not: all ranks would wait for each rank that sleeps."""
    slow: float = 1.0
    """Slowdown of an emulated device against the real one."""
    laps: dict[str, Any] = field(default_factory=dict)
    """LAPS knobs for this device."""
    prefixes: bool = False
    """True if prefill servers keep prefixes without a decode server."""

    @property
    def emulated(self) -> bool:
        """Return True if steps take as long as in a profile."""
        return self.name.startswith("emulated ")

    @property
    def knobs(self) -> dict[str, Any]:
        """Return the LAPS knobs without the profile, as the simulator takes them."""
        return {name: value for name, value in self.laps.items() if name != "profile"}

    def with_prefixes(self, pool_tokens: int = POOL_TOKENS) -> Device:
        """Return the device with servers that keep prefixes without a decode server, in a pool of ``pool_tokens``. The
        default pool evicts no prefix; emulated devices have memory for it."""
        return replace(self, args=(*self.args, "--max-total-tokens", str(pool_tokens)), prefixes=True)

    def env_of(self, variant: Variant) -> dict[str, str]:
        """Return the environment for a variant's server. The variant's own variables take precedence."""
        env = {**self.env, **variant.env}
        return with_path(env, PREFIXES) if self.prefixes else env

    def args_of(self, variant: Variant) -> tuple[str, ...]:
        """Return the arguments for a variant's server. The variant's own arguments take precedence."""
        knobs = {} if variant.stock else {**self.laps, **variant.knobs}
        return (*self.args, *((LapsConfig.JSON_FLAG, json.dumps(knobs)) if knobs else ()), *variant.args)


MEMORY = ("--mem-fraction-static", "0.85")
"""Share of memory for a server. With SGLang's default, servers that start side by side leave none for the KV cache."""
DEVICES = {
    CPU: Device(
        name=CPU,
        # On a CPU the step itself blocks, so the overlap loop would delay an answer until the next batch has run.
        args=("--max-total-tokens", "49152", *MEMORY, NORMAL_LOOP),
        chunk=1024,
        longest=4096,
        variants=(*STOCK, DUAL, LAPS),
        vocabulary=model.VOCABULARY,
        server_gib=2.6,
        layers=CPU_SHAPE.layers,
        checkpoint=lambda: model.make(MODELS, CPU_SHAPE),
        what=f"a {CPU_SHAPE.layers}-layer Qwen2 of hidden size {CPU_SHAPE.hidden} with seeded weights, float32",
        env={"OMP_NUM_THREADS": "1", **servers.KEEP_MEMORY},
    ),
    CUDA: Device(
        name=CUDA,
        args=(
            "--dtype", "bfloat16", "--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend", "fa3",
            "--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-total-tokens", "73728",
            *MEMORY,
        ),
        chunk=4096,
        longest=65536,
        variants=(*STOCK, DUAL, LAPS, GRAPHS),
        vocabulary=(10, 150000),
        server_gib=29.0,
        layers=model.SHAPES[CUDA_SHAPE].layers,
        checkpoint=lambda: model.write_shape(CUDA_SHAPE, MODELS / f"shape-{CUDA_SHAPE}", context=131072),
        what=f"the sizes of Qwen3-{CUDA_SHAPE} with dummy weights, bfloat16",
        start_s=900.0,
        at_once=True,
    ),
}  # fmt: skip
KINDS = f"{', '.join(DEVICES)} or [{EMULATED}]PROFILE[,slow=K]"


def emulated(asked: str) -> Device:
    """Return a device emulated on this machine; ``asked``: value of --laps-emulate, PROFILE[,slow=K].

    LAPS starts with the profile's step times; its slice and window times are stretched, too. Raises ValueError.
    """
    found = DeviceSpec.parse(asked)
    profile, slow = found.profile, found.slow
    folder = MODELS.parent / "emulated"
    stretched = folder / f"{profile.name}-slow{slow:g}.json"
    profile.stretched(slow).save(stretched)
    defaults = LapsConfig()
    shape = model.EMULATED
    return Device(
        name=f"emulated {asked}",
        # SGLang allocates one row of the context's length per running request.
        args=(
            "--max-total-tokens", "262144", "--max-running-requests", "128", *MEMORY, "--laps-emulate", asked,
        ),
        chunk=8192,
        longest=65536,
        variants=(*STOCK, LAPS),
        vocabulary=model.VOCABULARY,
        server_gib=2.0,
        layers=profile.layers,
        checkpoint=lambda: model.make(MODELS, shape),
        what=f"an EMULATED device: {profile.name}, {slow:g} times as slow ({profile.source})",
        env={"OMP_NUM_THREADS": "1", **servers.KEEP_MEMORY},
        slow=slow,
        laps={
            "profile": str(stretched),
            "slice_ms": slow * defaults.slice_ms,
            "wait_window_ms": slow * defaults.wait_window_ms,
        },
    )  # fmt: skip


H200 = "h200-qwen3-8b,slow=10"
"""Default emulated device. At a tenth of its real speed, a host with two cores keeps up."""


def add_device(p: argparse.ArgumentParser, default: str = "") -> None:
    """Add --device (a Device) to a command. ``default``: text of the option; "" means CUDA if available, else CPU."""

    def read(text: str) -> Device:
        try:
            return this(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    # argparse parses a default that is a string like a given value.
    p.add_argument("--device", type=read, default=default, help=f"{KINDS} ({default or 'cuda where there is one'})")


def free_gib(device: Device) -> float:
    """Return the memory (GiB) that is free for servers now, less a reserve."""
    if device.name == CUDA:
        import torch

        return 0.9 * float(torch.cuda.mem_get_info()[0]) / 2**30
    import psutil

    return float(psutil.virtual_memory().available) / 2**30 - 1.5


def this(name: str = "") -> Device:
    """Return the device of this name; without a name CUDA if available, else CPU. Raises ValueError."""
    if not name:
        return DEVICES[CUDA if has_cuda() else CPU]
    return DEVICES.get(name) or emulated(name.removeprefix(EMULATED))


def has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())
