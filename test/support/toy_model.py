"""Tiny model made of SGLang's building blocks, and a runner for it, to test passes in slices without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.vision import VisionAttention
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

HEADS, DIM, HIDDEN = 2, 4, 8


class Attention(nn.Module):
    """Projections, attention and the projection after it."""

    def __init__(self, layer: int, ran: Callable[[str], None]) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.attn = RadixAttention(HEADS, DIM, 1.0, HEADS, layer)

        def attend(q: torch.Tensor, *_: Any) -> torch.Tensor:
            ran("attention")
            return q

        self.attn.forward = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, None))
        return out


class Mlp(nn.Module):
    """Dense MLP."""

    def __init__(self, ran: Callable[[str], None]) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.ran = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN), ran

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran(f"mlp {len(x)}")
        out: torch.Tensor = self.down_proj(self.gate_up_proj(x).relu())
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, number: int, ran: Callable[[str], None]) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = nn.LayerNorm(HIDDEN), Attention(number, ran), Mlp(ran)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm(x))
        return x + self.mlp(x)


class EncoderAttention(VisionAttention):
    """Attention of an encoder, which returns its rows unchanged."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class EncoderLayer(nn.Module):
    """One layer of an encoder."""

    def __init__(self, ran: Callable[[str], None]) -> None:
        super().__init__()
        self.attn, self.mlp, self.ran = EncoderAttention(), nn.Linear(HIDDEN, HIDDEN), ran

    def forward(self, x: torch.Tensor, *, windows: object) -> torch.Tensor:
        self.ran(f"encoder {len(x)}")
        return x + self.mlp(self.attn(x))


class Model(nn.Module):
    """Model of `layers` layers behind an encoder of `encoder` layers, which report to `ran` what they run."""

    def __init__(self, layers: int, ran: Callable[[str], None], encoder: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.ModuleList(EncoderLayer(ran) for _ in range(encoder))
        self.layers = nn.ModuleList(Layer(i, ran) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.encoder:
            x = block(x, windows=None)
        for layer in self.layers:
            x = layer(x)
        return x


def batch(*shape: tuple[int, int]) -> Any:
    """Return a forward batch of requests with these (new, history) tokens."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    tokens = sum(new for new, _ in shape)
    return SimpleNamespace(
        extend_seq_lens_cpu=[new for new, _ in shape],
        extend_prefix_lens_cpu=[old for _, old in shape],
        global_num_tokens_cpu=None,
        num_prefix_chunks=None,
        tbo_children=None,
        forward_mode=ForwardMode.EXTEND,
        x=torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)),
    )


class Runner(SimpleNamespace):
    """Model runner with such a model. ``ran`` lists the operators and the metadata set-ups that ran."""

    def __init__(self, layers: int, device: str = "cpu", encoder: int = 0) -> None:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        ran: list[str] = []
        metadata = lambda b: ran.append(f"metadata {sum(b.extend_seq_lens_cpu)}")  # noqa: E731
        super().__init__(
            ran=ran,
            model=Model(layers, ran.append, encoder).requires_grad_(False),
            server_args=SimpleNamespace(mm_enable_dp_encoder=False),
            device=device,
            device_timer=None,
            dtype=torch.float32,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            lora_manager=None,
            prefill_cuda_graph_runner="graphs",
            eager_runner=SimpleNamespace(load_batch=lambda b: b),
            attn_backend=SimpleNamespace(init_forward_metadata=metadata),
            model_config=SimpleNamespace(quantization=None, vocab_size=16, hidden_size=HIDDEN),
        )

    @contextmanager
    def context(self) -> Iterator[None]:
        """Set SGLang's forward context of this runner for the block."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            yield

    def forward(self, b: Any) -> torch.Tensor:
        with self.context():
            out: torch.Tensor = self.model(b.x)
        return out
