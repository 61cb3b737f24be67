"""HiCache without a GPU.

In SGLang, copies between device and host are CUDA kernels on separate streams. Here each stream is a thread that works
in order. A copy is made by torch, takes ``COPY_S`` and keeps its target at NaN until it is done. Therefore a batch that
reads a layer before that layer's copy has ended computes NaN, whereas a GPU would read stale memory.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace

import torch

COPY_S = 0.05
"""Duration of each copy (seconds); loading a prompt's prefix needs one copy for each layer."""


class Stream:
    """Stream that runs its work in order on its own thread."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._todo.get()()

    def put(self, work: Callable[[], object]) -> None:
        self._todo.put(work)

    def wait_stream(self, other: object) -> None:
        """Do nothing: the host computes at launch, so the other stream's work is done."""

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class Host:
    """Stream of the batches: the calling thread itself."""

    def put(self, work: Callable[[], object]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


_host = Host()
_local = threading.local()


def current_stream() -> Stream | Host:
    return getattr(_local, "stream", _host)


@contextmanager
def stream(on: Stream) -> Iterator[None]:
    before, _local.stream = current_stream(), on
    try:
        yield
    finally:
        _local.stream = before


class Event:
    """Event like CUDA's: done before it is recorded, then done again once its stream reaches it."""

    def __init__(self, enable_timing: bool = False) -> None:
        if enable_timing:
            raise NotImplementedError
        self._done = threading.Event()
        self._done.set()

    def record(self, on: Stream | Host | None = None) -> None:
        self._done = threading.Event()
        (on or current_stream()).put(self._done.set)

    def wait(self, on: Stream | Host | None = None) -> None:
        (on or current_stream()).put(self._done.wait)

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the tokens at these indices, layer by layer, on the current stream."""
    for dst in dst_layers:
        dst[dst_indices] = torch.nan

    def copy() -> None:
        time.sleep(COPY_S)
        for src, dst in zip(src_layers, dst_layers, strict=True):
            dst[dst_indices] = src[src_indices]

    current_stream().put(copy)


def to_host_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the tokens at these indices into pages [pages, layers, page_size, ...]; the layers of each target follow one
    another in ``src_ptrs``. At once: SGLang keeps states on the device until their copy is done, and has few slots."""
    layers, page, place = len(src_ptrs) // len(dst_ptrs), dst_indices // page_size, dst_indices % page_size

    def copy() -> None:
        for i, src in enumerate(src_ptrs):
            dst_ptrs[i // layers][page, i % layers, place] = src[src_indices]

    current_stream().put(copy)


def from_host_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of the tokens at these indices out of pages [pages, layers, page_size, ...]."""
    layers = [src[:, layer_id].flatten(0, 1) for src in src_ptrs]
    transfer_kv_direct(layers, dst_ptrs, src_indices, dst_indices, page_size)


def host_memory(dims: tuple[int, ...], dtype: torch.dtype, *_: object, **__: object) -> torch.Tensor:
    """Return the buffer of the host tier, without registering it with a driver."""
    return torch.empty(dims, dtype=dtype)


def load() -> None:
    """Replace SGLang's device copies; entry point of ``sglang.srt.plugins``."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import base, mamba, mha

    device = SimpleNamespace(__name__="host", Stream=Stream, Event=Event, stream=stream, current_stream=current_stream)
    cache_controller.device_module = l2_transfer.device_module = device
    # By default 10 GiB of the machine must stay free, but concurrent tests can use this memory.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    mha.transfer_kv_direct = transfer_kv_direct
    for pool in (mha, mamba):
        pool.transfer_kv_all_layer_direct_lf_pf = to_host_pages
        pool.transfer_kv_per_layer_direct_pf_lf = from_host_pages
    mha.ALLOC_MEMORY_FUNCS["cpu"] = host_memory
