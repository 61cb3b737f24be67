"""Expert parallelism over gloo. SGLang's exchanges of tokens between ranks (DeepEP, for example) need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.runtime_context import get_parallel


class _Sent(NamedTuple):
    """One dispatch of a rank. A token has a copy for each of its experts."""

    rows: torch.Tensor
    """Row of each copy that the rank sent."""
    to: list[int]
    """Copies that the rank sent to each rank."""
    came: list[int]
    """Copies that came from each rank."""
    tokens: int


class HostDispatcher(BaseDispatcher):
    """Sends each token to the ranks that hold its experts, and sends the experts' results back."""

    def __init__(self, experts: int) -> None:
        """`experts`: number of physical experts on this rank."""
        super().__init__()
        self._experts = experts
        self._group = get_parallel().tp_group.cpu_group
        self._ranks = dist.get_world_size(self._group)
        self._sent: dict[int | None, _Sent] = {}
        """Dispatches of each part of a batch that are not combined yet."""
        self._halfway: dict[int | None, Any] = {}

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any, tbo_subbatch_index: int | None = None) -> None:
        """Send the tokens of a part of a batch; ``dispatch_b`` returns the tokens received. Parts can alternate."""
        self._halfway[tbo_subbatch_index] = self.dispatch(hidden_states, topk_output, tbo_subbatch_index)

    def dispatch_b(self, tbo_subbatch_index: int | None = None) -> StandardDispatchOutput:
        return self._halfway.pop(tbo_subbatch_index)

    def combine_a(self, combine_input: StandardCombineInput, tbo_subbatch_index: int | None = None) -> None:
        """Send back the experts' results of a part; ``combine_b`` returns the sums."""
        self._halfway[tbo_subbatch_index] = self.combine(combine_input, tbo_subbatch_index)

    def combine_b(self, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        return self._halfway.pop(tbo_subbatch_index)

    def dispatch(
        self, hidden_states: torch.Tensor, topk_output: Any, part: int | None = None
    ) -> StandardDispatchOutput:
        """Return the copies of tokens [n, size] that are for experts of this rank, each with its one expert here.

        `hidden_states`: [tokens, size] of this rank; `topk_output`: physical experts of each token, -1 = none.
        """
        ids, weights = topk_output.topk_ids.long(), topk_output.topk_weights
        rows, slots = torch.nonzero(ids >= 0, as_tuple=True)
        ranks, order = torch.sort(ids[rows, slots] // self._experts, stable=True)
        rows, slots = rows[order], slots[order]
        to = torch.bincount(ranks, minlength=self._ranks)
        came = torch.empty_like(to)
        dist.all_to_all_single(came, to, group=self._group)
        self._sent[part] = sent = _Sent(rows, to.tolist(), came.tolist(), len(hidden_states))
        states = self._exchange(hidden_states[rows], sent.to, sent.came)
        local = self._exchange((ids[rows, slots] % self._experts).unsqueeze(1), sent.to, sent.came)
        share = self._exchange(weights[rows, slots].unsqueeze(1), sent.to, sent.came)
        return StandardDispatchOutput(states, None, StandardTopKOutput(share, local, share))

    def combine(self, combine_input: StandardCombineInput, part: int | None = None) -> torch.Tensor:
        """Return for each token of this rank the sum of its experts' results [tokens, size]."""
        sent = self._sent.pop(part)
        back = self._exchange(combine_input.hidden_states, sent.came, sent.to)
        return back.new_zeros((sent.tokens, back.shape[-1])).index_add_(0, sent.rows, back)

    def _exchange(self, values: torch.Tensor, to: list[int], came: list[int]) -> torch.Tensor:
        """Send `to` rows to each rank, and return the `came` rows from each rank."""
        found = values.new_empty((sum(came), *values.shape[1:]))
        dist.all_to_all_single(found, values.contiguous(), came, to, group=self._group)
        return found


def compute_own_experts() -> None:
    """Make SGLang's PyTorch experts skip the experts of other ranks (-1), and accept batches without own experts."""
    from sglang.srt.layers.moe import fused_moe_native

    usual = fused_moe_native.moe_forward_native

    def forward(layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        rows, slots = torch.nonzero(ids >= 0, as_tuple=True)
        if 0 < len(rows) == ids.numel():
            return usual(layer, x, topk_output, moe_runner_config)
        done = torch.zeros_like(x)
        if not len(rows):
            return done
        share, own = (values[rows, slots].unsqueeze(1) for values in (weights, ids))
        one_each = StandardTopKOutput(share, own, share)
        return done.index_add_(0, rows, usual(layer, x[rows], one_each, moe_runner_config))

    fused_moe_native.moe_forward_native = forward


def exchange_over_gloo() -> None:
    """Give layers of experts this dispatcher in place of the dispatcher that --moe-a2a-backend names."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    usual = layer.create_moe_dispatcher

    def create(moe_runner_config: Any, quant_method: Any) -> BaseDispatcher:
        if get_moe_a2a_backend().is_none():
            return usual(moe_runner_config, quant_method)
        return HostDispatcher(moe_runner_config.num_local_experts)

    layer.create_moe_dispatcher = create
    # SGLang calls these functions of every device on which it counts choices of experts.
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]


class _NoCuda:
    """Stand-in for ``torch`` that reports one multiprocessor instead of asking a GPU."""

    def __getattr__(self, name: str) -> Any:
        if name != "cuda":
            return getattr(torch, name)
        return SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(multi_processor_count=1))


def overlap_two_batches() -> None:
    """Run --enable-two-batch-overlap without dividing a GPU's multiprocessors between experts and exchange."""
    from sglang.srt.batch_overlap import operations_strategy

    operations_strategy.torch = _NoCuda()
    operations_strategy.DeepEPConfig = SimpleNamespace(get_instance=lambda: SimpleNamespace(num_sms=0))


def compute_in_pytorch(model: torch.nn.Module) -> None:
    """Make experts behind an exchange run the kernels of other layers; by default they run kernels for GPUs."""
    for module in model.modules():
        if hasattr(module, "deprecate_flag"):
            module.deprecate_flag = True  # type: ignore[assignment]
