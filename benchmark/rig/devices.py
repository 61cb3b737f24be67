"""Server arguments and a model that suit the machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laps_core.config import LapsConfig
from sglang_laps.emulation.asked import Asked

from benchmark.rig import model, servers
from benchmark.rig.variants import DUAL, GRAPHS, LAPS, STOCK, Variant

CPU, CUDA = "cpu", "cuda"
EMULATED = "emulated:"
"""Before what --laps-emulate takes."""
OVERLAP, NORMAL = "overlap", "normal"
NORMAL_LOOP = "--disable-overlap-schedule"
MODELS = model.REPO / "out" / "models"
CPU_SHAPE = model.SLICED
CUDA_SHAPE = "7B"


@dataclass(frozen=True)
class Device:
    """One kind of machine."""

    name: str
    args: tuple[str, ...]
    """Of every server."""
    chunk: int
    """--chunked-prefill-size (tokens) unless told otherwise."""
    longest: int
    """Longest prompt of a load (tokens)."""
    variants: tuple[str, ...]
    """Compared unless told otherwise."""
    vocabulary: tuple[int, int]
    """Token ids drawn from: [low, high)."""
    server_gib: float
    """Memory one more server takes (GiB): of the machine on a CPU, of the device elsewhere."""
    layers: int
    """Of the model."""
    checkpoint: Callable[[], Path]
    what: str
    """The model in words."""
    env: dict[str, str] = field(default_factory=dict)
    start_s: float = 240.0
    """Longest start of a server (seconds)."""
    at_once: bool = False
    """Whether servers start side by side: most of a start keeps one core busy."""
    slow: float = 1.0
    """How many times as slow an emulated device is as what it emulates."""
    laps: dict[str, Any] = field(default_factory=dict)
    """Knobs that LAPS needs on it."""

    @property
    def emulated(self) -> bool:
        """Whether its steps last as long as a profile says."""
        return self.name.startswith("emulated ")

    def in_loop(self, loop: str) -> Device:
        """The same with one of SGLang's event loops, OVERLAP or NORMAL."""
        return replace(self, args=(*(a for a in self.args if a != NORMAL_LOOP), *([NORMAL_LOOP] * (loop == NORMAL))))

    def args_of(self, variant: Variant) -> tuple[str, ...]:
        """Of the server of a variant, whose own arguments win."""
        knobs = (LapsConfig.JSON_FLAG, json.dumps(self.laps)) if self.laps and not variant.stock else ()
        return (*self.args, *knobs, *variant.args)


DEVICES = {
    CPU: Device(
        name=CPU,
        # The overlap loop would hold an answer back until the next batch has run: on a CPU the step itself blocks.
        args=("--max-total-tokens", "49152", NORMAL_LOOP),
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
            "--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-total-tokens", "131072",
            "--mem-fraction-static", "0.85",
        ),
        chunk=4096,
        longest=65536,
        variants=(*STOCK, DUAL, LAPS, GRAPHS),
        vocabulary=(10, 150000),
        server_gib=30.0,
        layers=28,
        checkpoint=lambda: model.write_shape(CUDA_SHAPE, MODELS / f"shape-{CUDA_SHAPE}", context=131072),
        what="the shape of Qwen2.5-7B with dummy weights, bfloat16",
        start_s=900.0,
        at_once=True,
    ),
}  # fmt: skip
KINDS = f"{', '.join(DEVICES)} or {EMULATED}PROFILE[,slow=K]"


def emulated(asked: str) -> Device:
    """A device that is emulated on this machine; ``asked``: as --laps-emulate, PROFILE[,slow=K].

    LAPS starts from the profile's step times, and its times are stretched as the device is. Raises ValueError.
    """
    found = Asked.parse(asked)
    profile, slow = found.profile, found.slow
    folder = MODELS.parent / "emulated"
    stretched = folder / f"{profile.name}-slow{slow:g}.json"
    profile.stretched(slow).save(stretched)
    defaults = LapsConfig()
    shape = model.EMULATED
    return Device(
        name=f"emulated {asked}",
        # The pool of requests holds a row as long as the context for each of them.
        args=(
            "--max-total-tokens", "262144", "--max-running-requests", "128", "--laps-emulate", asked,
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
"""Emulated unless asked otherwise: at a tenth of its speed the host of two cores is in proportion."""


def add_emulated(p: argparse.ArgumentParser, default: str = H200) -> None:
    """--device of a command that runs on an emulated device: a Device. ``default``: the same, or "cpu"."""

    _add(
        p, lambda text: DEVICES[CPU] if text == default == CPU else emulated(text.removeprefix(EMULATED)), default,
        "as --laps-emulate: PROFILE[,slow=K]",
    )  # fmt: skip


def add_device(p: argparse.ArgumentParser) -> None:
    """--device of a command that runs on any kind of machine: a Device."""
    _add(p, this, "", f"{KINDS} (cuda where there is one)")


def _add(p: argparse.ArgumentParser, find: Callable[[str], Device], default: str, words: str) -> None:
    def read(text: str) -> Device:
        try:
            return find(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    # argparse reads a default that is text as if it had been given.
    p.add_argument("--device", type=read, default=default, help=words)


def free_gib(device: Device) -> float:
    """Memory (GiB) servers may take now, a reserve left."""
    if device.name == CUDA:
        import torch

        return 0.9 * float(torch.cuda.mem_get_info()[0]) / 2**30
    import psutil

    return float(psutil.virtual_memory().available) / 2**30 - 1.5


def this(name: str = "") -> Device:
    """The kind of this name; without one, CUDA where there is one. Raises ValueError."""
    if name.startswith(EMULATED):
        return emulated(name.removeprefix(EMULATED))
    if name and name not in DEVICES:
        raise ValueError(f"no device {name!r}: {KINDS}")
    return DEVICES[name or (CUDA if has_cuda() else CPU)]


def has_cuda() -> bool:
    """Whether this machine has a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())
