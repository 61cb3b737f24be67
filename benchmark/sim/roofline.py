"""Analytic profiles of Hopper GPUs with Qwen2.5 models: published figures, stated assumptions, nothing measured.

    python -m benchmark.sim.roofline        writes profiles/<gpu>-<model>.json

A step takes T_comp + T_mem (LAPS, s2.1): arithmetic at a share of the dense bf16 peak, and memory traffic (weights
once, new KV written, history KV read) at a share of the bandwidth, or the host's launches where those take longer than
the weights. The sum is what LAPS's latency model can express; hardware that overlaps both perfectly would be faster
near the boundary, by half at most.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laps_core.latency.boundary import knee
from laps_core.latency.model import Coefficients
from laps_plan.profile import ANALYTIC, FOLDER, Profile

BYTES = 2
"""Of a bf16 number."""


@dataclass(frozen=True)
class Gpu:
    """Published figures of one GPU."""

    flops: float
    """Dense bf16 (1/s)."""
    bandwidth: float
    """HBM (byte/s)."""
    source: str


@dataclass(frozen=True)
class Model:
    """Shape of a decoder with grouped-query attention and a gated MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def weights(self) -> int:
        """Parameters of the layers, which every token passes."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def kv_bytes(self) -> int:
        """KV cache of one token."""
        return 2 * self.layers * self.kv_heads * self.head * BYTES


GPUS = {
    "h100": Gpu(989.4e12, 3.35e12, "NVIDIA H100 SXM5 data sheet: 989.4 TFLOPS dense bf16, 3.35 TB/s HBM3"),
    "h200": Gpu(989.4e12, 4.8e12, "NVIDIA H200 SXM data sheet: 989.4 TFLOPS dense bf16, 4.8 TB/s HBM3e"),
}
MODELS = {
    "qwen2.5-7b": Model(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": Model(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": Model(64, 5120, 40, 8, 27648, 152064),
}
"""Shapes from the models' published config.json."""


@dataclass(frozen=True)
class Assumed:
    """What is assumed, not published. Times in seconds."""

    compute_share: float = 0.6
    """Of peak arithmetic that large GEMMs reach (0..1)."""
    attention_share: float = 0.4
    """Of peak that attention reaches (0..1)."""
    bandwidth_share: float = 0.8
    """Of peak bandwidth (0..1)."""
    eager_layer_s: float = 220e-6
    """Host time to launch one layer kernel by kernel."""
    breakable_layer_s: float = 90e-6
    """The same where graphs are broken at attention, SGLang 0.5.23's default for prefill."""
    full_layer_s: float = 4e-6
    """Device gaps per layer within one whole graph."""
    replay_s: float = 150e-6
    """Host time to fill and launch one whole graph."""
    around_s: float = 1.2e-3
    """Per step outside the layers: inputs, logits, sampling, with the device waiting."""
    slot_s: float = 10e-6
    """Per request of a step: attention metadata."""
    step_host_s: float = 0.4e-3
    """Scheduler time per step that overlap does not hide."""
    front_s: float = 0.15e-3
    """Tokenizer and HTTP per request, in a process of its own."""
    reply_s: float = 0.5e-3
    """From the sampled token to the client."""


def coefficients(gpu: Gpu, model: Model, assumed: Assumed, launch_s: float) -> Coefficients:
    """T = T_comp + T_mem (LAPS, s2.1) of a step whose layers cost the host ``launch_s`` in all (seconds)."""
    flops = gpu.flops * assumed.compute_share
    bandwidth = gpu.bandwidth * assumed.bandwidth_share
    logits = model.hidden * model.vocab
    return Coefficients(
        # Per layer 2 FLOPs a multiply-add, QK and PV, over the causal half of L x L and all of L x H.
        alpha=2.0 * model.layers * model.hidden / (gpu.flops * assumed.attention_share),
        linear=2.0 * model.weights / flops + model.kv_bytes / bandwidth,
        gamma_r=model.kv_bytes / bandwidth,
        per_request=2.0 * logits / flops + assumed.slot_s,
        fixed=max(BYTES * (model.weights + logits) / bandwidth, launch_s) + assumed.around_s,
    )


def profile(gpu_name: str, model_name: str, assumed: Assumed | None = None) -> Profile:
    """The profile of one GPU with one model, tensor parallelism 1."""
    gpu, model, assumed = GPUS[gpu_name], MODELS[model_name], assumed or Assumed()

    def path(layer_s: float) -> Coefficients:
        return coefficients(gpu, model, assumed, layer_s * model.layers)

    known = path(assumed.breakable_layer_s)
    details: dict[str, Any] = {
        "gpu": asdict(gpu),
        "model": asdict(model),
        "parameters_in_layers": model.weights,
        "assumed": asdict(assumed),
        "tensor_parallel": 1,
        "boundary_tokens": knee(known.alpha, known.linear, known.fixed + known.per_request),
    }
    return Profile(
        name=f"{gpu_name}-{model_name}",
        source=ANALYTIC,
        coefficients=known,
        graph_fixed_s=path(assumed.full_layer_s).fixed + assumed.replay_s,
        eager_fixed_s=path(assumed.eager_layer_s).fixed,
        front_s=assumed.front_s,
        step_host_s=assumed.step_host_s,
        reply_s=assumed.reply_s,
        details=details,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.sim.roofline", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    for gpu, model in itertools.product(GPUS, MODELS):
        made = profile(gpu, model)
        made.save(args.out / f"{made.name}.json")
        c = made.coefficients
        print(
            f"{made.name}: fixed {c.fixed * 1e3:.2f} ms (eager {(made.eager_fixed_s or 0) * 1e3:.2f}, graph "
            f"{(made.graph_fixed_s or 0) * 1e3:.2f}), {c.linear * 1e6:.1f} us/token, {c.alpha * 1e9:.2f} ns/token^2, "
            f"boundary {made.details['boundary_tokens']:.0f} tokens"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
