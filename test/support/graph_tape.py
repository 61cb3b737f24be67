"""CUDA graphs on a CPU: a tape of the operations that a capture runs, played again on the same tensors.

With this folder in PYTHONPATH the module is a plugin of SGLang: SGLang's full graph backend, unchanged, captures tapes,
and attention computes only from FlashAttention's capture-stable metadata. Like a CUDA graph, a tape does not rerun
Python and refuses what a capture cannot hold: reads of values by the host, outputs whose shape depends on values, and
copies from Python lists. Unwritten memory holds NaN or an absurd number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero")
VALUE_SHAPED = ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::bincount")
FROM_HOST = ("aten::lift_fresh", "aten::lift_fresh_copy")
EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
TO_HOST = (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__array__)

MODEL_MODULES = {"sglang.srt.managers.scheduler", "benchmark.rig.runner"}
"""Modules that only processes with a model have imported when plugins are loaded."""
MAX_LENGTH = 512
"""Longest sequence that the attention below computes (tokens); it gathers this many KV tokens for each request."""


class NotCapturable(RuntimeError):
    """Operation that a captured graph could not replay."""


def fill_with_garbage(value: Any) -> None:
    """Fill unwritten memory with NaN or an absurd number."""
    if torch.is_tensor(value):
        value.fill_(torch.nan if value.is_floating_point() else 7 if value.dtype == torch.bool else -(1 << 20))


class _MethodCheck(TorchFunctionMode):
    """Refuses tensor methods that copy values to the host without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_HOST:
            raise NotCapturable(f"a capture reads values: Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in HOST_READS:
            raise NotCapturable(f"a capture reads values: {name}")
        if name in VALUE_SHAPED or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
            raise NotCapturable(f"a capture has a shape that depends on values: {name}")
        if name in FROM_HOST:
            raise NotCapturable(f"a capture copies from the host: {name}")
        if name == "aten::index" and any(torch.is_tensor(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise NotCapturable("a capture has a shape that depends on values: an index by a mask")
        out = func(*args, **kwargs)
        if name in EMPTY:
            fill_with_garbage(out)
        self._tape.add(func, args, kwargs, out, name in EMPTY)
        return out


@dataclass(frozen=True)
class _TapedTensor:
    """Tensor that the tape makes, by its number in order of creation."""

    at: int


class Tape:
    """Replacement for ``torch.cuda.CUDAGraph``."""

    replays = 0
    """Replays of all tapes."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, list[_TapedTensor | None], bool]] = []
        self._last: dict[int, int] = {}
        self._made: Any = WeakIdKeyDictionary()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every operation of the block on the tape."""
        with _MethodCheck(), _Recorder(self):
            yield
        self._made = WeakIdKeyDictionary()

    def add(self, func: Any, args: Any, kwargs: Any, out: Any, empty: bool) -> None:
        """Record one operation that was run."""

        def known(value: Any) -> Any:
            made = self._made.get(value) if torch.is_tensor(value) else None
            if made is not None:
                self._last[made.at] = len(self._calls)
            return value if made is None else made

        inputs = tree_map(known, (args, kwargs))
        outs: list[_TapedTensor | None] = []
        for value in tree_flatten(out)[0]:
            # An in-place operation returns its own argument.
            new = torch.is_tensor(value) and not any(value is a for a in tree_flatten((args, kwargs))[0])
            outs.append(_TapedTensor(len(self._last)) if new else None)
            if new:
                self._made[value] = outs[-1]
                self._last[len(self._last)] = len(self._calls)
        self._calls.append((func, inputs, outs, empty))

    def replay(self) -> None:
        """Run the operations again, on the same inputs from before the capture; make all other tensors anew."""
        made: dict[int, Any] = {}

        def now(value: Any) -> Any:
            return made[value.at] if isinstance(value, _TapedTensor) else value

        with torch.no_grad():
            for i, (func, inputs, outs, empty) in enumerate(self._calls):
                args, kwargs = tree_map(now, inputs)
                found = func(*args, **kwargs)
                if empty:
                    fill_with_garbage(found)
                for work in tree_flatten(found)[0]:
                    if isinstance(work, torch.ScriptObject):
                        cast(Any, work).wait()  # of a collective; on a device the stream would wait
                made |= {o.at: v for o, v in zip(outs, tree_flatten(found)[0], strict=True) if o is not None}
                for gone in [at for at in made if self._last[at] <= i]:
                    del made[gone]
        Tape.replays += 1

    def reset(self) -> None:
        """Clear the tape."""
        self._calls.clear()


@contextmanager
def graph(cuda_graph: Tape, **_: Any) -> Iterator[None]:
    """Replace ``torch.cuda.graph``: record the block on the tape."""
    with cuda_graph.recording():
        yield


def attention(runner: Any) -> Any:
    """Return torch_native attention which, in captured graphs, uses FlashAttention's metadata and reads no values.

    Rows that belong to no request are NaN, because a kernel does not write them.
    """
    # These kernels need a driver; the metadata code does not.
    missing = [n for n in ("sgl_kernel", "sglang.kernels.ops.attention.flash_attention") if n not in sys.modules]
    sys.modules.update({name: MagicMock() for name in missing})
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    for name in missing:
        del sys.modules[name]
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class TapedAttention(TorchNativeAttnBackend):
        _init_full_cg_prefill_metadata = FlashAttentionBackend._init_full_cg_prefill_metadata

        def __init__(self) -> None:
            super().__init__(runner)
            self.kv_index_translator = runner.kv_index_translator
            self.req_to_token = runner.req_to_token_pool.req_to_token
            self.max_context_len = self.max_num_pages = runner.model_config.context_len
            self.page_size = runner.page_size
            self.captured = False

        def can_run_prefill_cuda_graph(self, forward_batch: Any) -> bool:
            return max(forward_batch.seq_lens_cpu.tolist()) <= MAX_LENGTH

        def init_forward_metadata(self, forward_batch: Any) -> None:
            self.captured = False
            super().init_forward_metadata(forward_batch)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            self.captured = True
            self._init_full_cg_prefill_metadata(forward_batch, in_capture)

        def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
            if not self.captured:
                return super().forward_extend(q, k, v, layer, batch, save_kv_cache)
            m = self.forward_metadata
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
            kvs = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            each = layer.tp_q_head_num // kvs[0].shape[1]
            at = torch.arange(rows.shape[0])[:, None]
            mine = (m.cu_seqlens_q[1:] <= at).sum(1, keepdim=True)
            table = m.page_table[:, :MAX_LENGTH].long()
            count, reach = table.shape
            # Compare each row with the KV of every request; it attends only to its own request, up to its own position.
            slot, position = torch.arange(count).repeat_interleave(reach), torch.arange(reach).repeat(count)
            held = position < m.cache_seqlens_int32[slot]
            last = (m.cache_seqlens_int32 - m.cu_seqlens_q[1:])[slot] + at
            seen = (slot == mine) & (position <= last)
            k, v = (kv[table.where(held.view(table.shape), 0)].flatten(0, 1).repeat_interleave(each, 1) for kv in kvs)
            # Sums in full precision for any model dtype, as in a kernel.
            scores = torch.einsum("rhd,shd->hrs", rows.float(), k.float()) * layer.scaling
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out = torch.einsum("hrs,shd->rhd", weights, v.float().where(held[:, None, None], 0.0)).to(q.dtype)
            return out.where((at < m.cu_seqlens_q[-1])[:, :, None], torch.nan).reshape(q.shape)

    return TapedAttention()


def load() -> None:
    """Install tapes in processes that run a model on a CPU (entry point of the group ``sglang.srt.plugins``)."""
    from sglang_laps import graphs

    if torch.cuda.is_available() or sys.modules.keys().isdisjoint(MODEL_MODULES):
        return
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    ATTENTION_BACKENDS["torch_native"] = attention
    graphs.ATTENTION["cpu"] = ("TapedAttention",)
    parallel_state.get_current_device_stream_fast = torch.cpu.current_stream
    device: Any = torch.cpu
    device.graph, device.graph_pool_handle = graph, lambda: (0, 0)
    device = torch.cuda
    device.CUDAGraph = Tape
