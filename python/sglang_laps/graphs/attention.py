"""Capture-stable attention metadata per slot count.

SGLang keeps one such object per attention backend, sized for one number of request slots. A seam swaps in the one of a
cell's slot count while that cell is captured or its replay prepared, and puts SGLang's own back afterwards, so that a
stock ``full`` runner may live beside the cells.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from laps_core.buckets import Cell


class Seam(Protocol):
    """What the cells' runner asks of an attention backend."""

    shaped: bool
    """Whether a capture is fixed to L and B; if not, all cells have the largest of both."""

    def using(self, cell: Cell) -> Any:
        """Context in which the backend's capture-stable metadata is the cell's."""

    def baked(self, cell: Cell) -> None:
        """Within ``using``, after metadata was prepared for capture: what the launches are fixed to."""


class _Swap:
    """Attributes of the backend that are the cells' inside ``using`` and SGLang's outside."""

    def __init__(self, backend: Any, names: tuple[str, ...]) -> None:
        self._backend = backend
        self._names = names
        self._ours: dict[str, Any] = {}

    @contextmanager
    def using(self, cell: Cell) -> Iterator[None]:
        held = {n: getattr(self._backend, n, None) for n in (*self._names, "forward_metadata")}
        for name in self._names:
            setattr(self._backend, name, self._ours.get(name))
        self._enter(cell)
        try:
            yield
        finally:
            self._leave(cell)
            for name in self._names:
                self._ours[name] = getattr(self._backend, name, None)
            for name, value in held.items():
                setattr(self._backend, name, value)

    def _enter(self, cell: Cell) -> None: ...

    def _leave(self, cell: Cell) -> None: ...

    def baked(self, cell: Cell) -> None: ...


class FlashAttentionSeam(_Swap):
    """FlashAttention 3 and 4: per slot count, a view of one metadata object made for the most slots.

    The first cell prepared must have the most slots.
    """

    shaped = True
    METADATA = "full_cg_prefill_metadata"

    def __init__(self, backend: Any) -> None:
        super().__init__(backend, (self.METADATA, "full_cg_prefill_swa_out_cache_loc"))
        self._root: Any = None
        self._views: dict[int, Any] = {}

    def _enter(self, cell: Cell) -> None:
        if self._root is not None:
            setattr(self._backend, self.METADATA, self._view(cell.batch))

    def _leave(self, cell: Cell) -> None:
        made = getattr(self._backend, self.METADATA, None)
        if self._root is None and made is not None:
            self._root = made
            self._views[cell.batch] = made

    def _view(self, slots: int) -> Any:
        if slots not in self._views:
            most = self._root.cache_seqlens_int32.shape[0]
            if slots > most:
                raise ValueError(f"{slots} request slots, but attention metadata was made for {most}")
            view = copy.copy(self._root)
            for name, value in vars(self._root).items():
                if torch.is_tensor(value) and value.ndim and value.shape[0] in (most, most + 1):
                    setattr(view, name, value[: slots + value.shape[0] - most])
            self._views[slots] = view
        return self._views[slots]

    def baked(self, cell: Cell) -> None:
        """Attention is launched for L queries per slot, not for N [L s3.1]."""
        getattr(self._backend, self.METADATA).max_seq_len_q = cell.length


class FlashInferSeam(_Swap):
    """FlashInfer: one wrapper set for the most slots, planned anew before each replay. It knows no longest query."""

    shaped = False

    def __init__(self, backend: Any) -> None:
        super().__init__(
            backend,
            (
                "full_cg_prefill_wrappers",
                "full_cg_prefill_req_slots",
                "full_cg_prefill_workspace_buffer",
                "full_cg_prefill_qo_indptr",
                "full_cg_prefill_kv_indptr",
                "full_cg_prefill_kv_indices",
            ),
        )


class BatchSeam(_Swap):
    """Backends that read lengths from the batch itself; only an emulated replay can use them."""

    shaped = True

    def __init__(self, backend: Any) -> None:
        super().__init__(backend, ())


SEAMS: dict[str, type[_Swap]] = {
    "FlashAttentionBackend": FlashAttentionSeam,
    "FlashInferAttnBackend": FlashInferSeam,
}
EMULATED_SEAMS: dict[str, type[_Swap]] = {"TorchNativeAttnBackend": BatchSeam}


def seam_for(attn_backend: Any, *, emulated: bool) -> Seam | str:
    """The seam of an attention backend, or why it has none."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    if isinstance(attn_backend, HybridAttnBackend):
        attn_backend = attn_backend.prefill_backend
    known = EMULATED_SEAMS if emulated else SEAMS
    name = type(attn_backend).__name__
    if name not in known:
        return f"attention backend {name} is not one of {', '.join(known)}"
    if getattr(attn_backend, "use_mla", False):
        return "multi-head latent attention is not supported"
    if name != "FlashAttentionBackend" and getattr(attn_backend, "use_sliding_window_kv_pool", False):
        return f"a sliding-window KV pool under {name}"
    return known[name](attn_backend)  # type: ignore[return-value,call-arg]
