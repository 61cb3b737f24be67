"""SGLang's full prefill graph runner, with a graph per (L, B, N) cell instead of one per token count."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import tqdm
from laps_core.buckets import Batch, Cell
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.utils import get_available_gpu_memory

from sglang_laps.graphs.attention import Seam
from sglang_laps.graphs.backend import EmulatedGraphBackend, drop
from sglang_laps.graphs.plan import Plan
from sglang_laps.graphs.ranks import Ranks

logger = logging.getLogger(__name__)

RESERVE_MIB = 1024.0
"""Device memory capture leaves free for serving."""

REHEARSALS = 3
"""Replays timed per cell after its capture."""


class CellGraphRunner(PrefillCudaGraphRunner):  # type: ignore[misc]
    """Captures and replays cells; ``select`` says which one the inherited methods work on.

    Rows beyond a batch's tokens carry token 0 at position 0 and write to KV slot 0, the sink; unused request slots have
    no tokens and no history. Neither is read by a real row.
    """

    def __init__(
        self,
        model_runner: Any,
        plan: Plan,
        seam: Seam,
        ranks: Ranks,
        emulation: type[EmulatedGraphBackend] | None,
    ) -> None:
        # The inherited constructor ends in ``capture``, which needs these.
        self.plan = plan
        self.ranks = ranks
        self.seconds: dict[Cell, float] = {}
        self.mib: dict[Cell, float] = {}
        self.total_s = 0.0
        self._seam = seam
        self._emulation = emulation
        self._cell = plan.roof
        super().__init__(model_runner)

    # -- one cell at a time

    def select(self, cell: Cell) -> None:
        """Have the inherited methods pad to ``cell`` from now on."""
        self._cell = cell
        self._capture_req_slots = cell.batch
        self._full_cg_seq_lens_cpu = self._slot_lens[: cell.batch]

    def _pad_to_bucket(self, raw_size: int, buckets: Any) -> int:
        return self._cell.tokens

    def _shape_key(self, num_tokens: int, forward_batch: Any) -> ShapeKey:
        return _key(self._cell)

    def can_replay(self, forward_batch: ForwardBatch, cell: Cell) -> bool:
        """Whether ``cell`` may serve this batch, apart from its size."""
        self.select(cell)
        return cell in self.seconds and bool(super().can_run_graph(forward_batch))

    def replay(self, forward_batch: ForwardBatch, cell: Cell, **kwargs: Any) -> Any:
        """The forward of a batch that ``cell`` covers. Same result as the stock runner's ``execute``."""
        self.select(cell)
        with self._seam.using(cell):
            return super().execute(forward_batch, **kwargs)

    # -- capture

    @property
    def cells(self) -> list[Cell]:
        """What is captured."""
        return list(self.seconds)

    def capture(self) -> None:
        """Capture the plan within its budget. Raises what the first failing capture raised, nothing kept."""
        begin = time.perf_counter()
        self._slot_lens = torch.zeros(self.plan.roof.batch, dtype=torch.int64)
        self._body_forward = self.layer_model.forward
        if self._emulation:
            self.backend = self._emulation(self)
        try:
            super().capture()
        except Exception:
            self.backend.cleanup()
            raise
        self.device_module.synchronize()
        self.total_s = time.perf_counter() - begin

    def capture_more(self, cell: Cell) -> None:
        """Capture one more cell while serving; nothing may be in flight. Raises what the capture raised."""
        waiting, self._todo = self._todo, (cell,)
        try:
            super().capture()
        finally:
            self._todo = waiting
        self.device_module.synchronize()

    def discard(self, cell: Cell) -> None:
        """Free a cell's graph."""
        drop(self.backend, _key(cell))
        del self.seconds[cell], self.mib[cell]

    def _capture(self) -> None:
        if not self._emulation:
            super()._capture()
            return
        with self.backend.capture_session(None):
            self._capture_one_stream()

    _todo: tuple[Cell, ...] = ()

    def _capture_one_stream(self) -> None:
        if not self.seconds:
            self._make_metadata()
        todo = self._todo or self.plan.cells
        budget = self.plan.budget
        shown = self.ranks.first and not self._todo
        bar: Iterable[Cell] = tqdm.tqdm(todo, desc="Capturing prefill cells") if shown else todo
        for cell in bar:
            spent = len(self.seconds), sum(self.seconds.values()), sum(self.mib.values())
            before, begin = self._free_mib(), time.perf_counter()
            if not self.ranks.all(budget.allows(*spent) and before > RESERVE_MIB):
                logger.info(
                    "LAPS graphs: capture ends after %d cells, %.1f s, %.0f MiB (%.0f MiB free).", *spent, before
                )
                break
            failed = self._try_capture(cell)
            if not self.ranks.all(failed is None):
                raise RuntimeError(f"capture of cell {cell} failed: {failed or 'on another rank'}") from failed
            self.seconds[cell] = time.perf_counter() - begin
            self.mib[cell] = 0.0 if self._emulation else max(0.0, before - self._free_mib())
            logger.info("LAPS graphs: cell %s in %.2f s, %.1f MiB.", cell, self.seconds[cell], self.mib[cell])

    def _try_capture(self, cell: Cell) -> Exception | None:
        try:
            self._capture_cell(cell)
        except Exception as e:
            return e
        return None

    def _make_metadata(self) -> None:
        """Have the backend make its metadata for the most rows and slots; cells use views of it."""
        self.select(self.plan.roof)
        batch, attn = self.capture_prepare(self.plan.roof.tokens)
        with self._seam.using(self.plan.roof):
            attn.init_forward_metadata_out_graph(batch, in_capture=True)

    def _capture_cell(self, cell: Cell) -> None:
        self.select(cell)
        batch, attn = self.capture_prepare(cell.tokens)
        if prepare := getattr(self.model_runner.model, "prepare_for_forward", None):
            prepare(batch)
        with self._seam.using(cell):
            attn.init_forward_metadata_out_graph(batch, in_capture=True)
            self._seam.baked(cell)
            self.backend.capture_one(
                _key(cell),
                self._body(batch, cell.tokens),
                post_warmup_hook=getattr(attn, "on_after_cuda_graph_warmup", None),
            )

    def _body(self, batch: ForwardBatch, tokens: int) -> Callable[[], Any]:
        def body() -> Any:
            # An emulated replay runs while the replay itself stands in for this method.
            held, self.layer_model.forward = self.layer_model.forward, self._body_forward
            try:
                return self._run_forward(batch, tokens)
            finally:
                self.layer_model.forward = held

        return body

    def capture_prepare(self, num_tokens: int) -> tuple[ForwardBatch, AttentionBackend]:
        """A dummy batch in the static buffers: as many requests of L tokens as ``num_tokens`` holds, no history."""
        # While serving, the buffers hold the last batch: its KV slots must not be written again.
        for name in ("input_ids", "positions", "out_cache_loc"):
            self.buffer_registry.get_slot(name).slice_for(self._cell.batch, num_tokens).zero_()
        batch, attn = super().capture_prepare(num_tokens)
        lens = [new for new, _ in full_batch(self._cell).requests]
        lens += [0] * (self._cell.batch - len(lens))
        new = torch.tensor(lens)
        for field in (batch.seq_lens, batch.orig_seq_lens, batch.extend_seq_lens):
            field.copy_(new)
        batch.extend_start_loc.copy_(torch.cumsum(new, 0) - new)
        batch.seq_lens_cpu = new
        batch.extend_seq_lens_cpu = list(lens)
        batch.extend_logprob_start_lens_cpu = list(lens)
        return batch, attn

    def rehearse(self, cell: Cell) -> tuple[Batch, float]:
        """Replay a captured cell's body on a dummy batch. Returns that batch and the mean time (seconds)."""
        self.select(cell)
        batch, attn = self.capture_prepare(cell.tokens)
        with self.model_context(), self.backend.replay_session(), self._seam.using(cell), torch.no_grad():
            attn.init_forward_metadata_out_graph(batch)
            self.backend.replay(_key(cell), batch)
            self.device_module.synchronize()
            begin = time.perf_counter()
            for _ in range(REHEARSALS):
                self.backend.replay(_key(cell), batch)
            self.device_module.synchronize()
        return full_batch(cell), (time.perf_counter() - begin) / REHEARSALS

    def _free_mib(self) -> float:
        if self._emulation:
            return math.inf
        mr = self.model_runner
        return float(get_available_gpu_memory(mr.device, mr.gpu_id, empty_cache=False)) * 1024


def full_batch(cell: Cell) -> Batch:
    """As many requests of L new tokens as the cell's rows and slots hold, the last one shorter."""
    lens: list[int] = []
    left = cell.tokens
    while left > 0 and len(lens) < cell.batch:
        lens.append(min(cell.length, left))
        left -= lens[-1]
    return Batch.of(lens)


def _key(cell: Cell) -> ShapeKey:
    # Not ``variant_label``: the inherited runner takes that for a cached-prefix variant.
    return ShapeKey(size=cell.tokens, attention_variant=f"laps:{cell.length}x{cell.batch}")


@contextmanager
def full_graph_config(plan: Plan) -> Iterator[None]:
    """SGLang's prefill graph settings as the cells' runner needs them; the server's own afterwards."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, PhaseConfig

    config = get_exec().graph.cuda_graph_config
    held = config.prefill
    rows = sorted({c.tokens for c in plan.candidates})
    config.prefill = PhaseConfig(backend=Backend.FULL, bs=rows, max_bs=rows[-1], full_prefill_max_req=plan.roof.batch)
    try:
        yield
    finally:
        config.prefill = held


def ranks_of_this_server() -> Ranks:
    """The ranks that run each batch together."""
    return Ranks(get_parallel().tp_group)
