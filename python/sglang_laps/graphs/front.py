"""What ModelRunner sees as its prefill graph runner: cells where they pay, the stock runner for all else."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from laps_core.buckets import Batch, Buckets, Cell, Choice, Demand, Gains
from laps_core.config import LapsConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel, get_schedule
from sglang.srt.utils.common import get_cuda_graph_max_batch_size

from sglang_laps.graphs.attention import seam_for
from sglang_laps.graphs.backend import emulation
from sglang_laps.graphs.clock import clock_for
from sglang_laps.graphs.plan import Limits, make_plan
from sglang_laps.graphs.runner import CellGraphRunner, full_graph_config, ranks_of_this_server

logger = logging.getLogger(__name__)


WEIGHT_ONLY = {None, "awq", "awq_marlin", "gptq", "gptq_marlin"}
"""Quantizations that leave activations alone. A scale taken over all rows would let the padded ones sway the real."""


class PrefillFront:
    """Chooses per batch; anything it does not define is the stock runner's.

    ``stock``: what SGLang made (a graph runner, its eager runner, or None). The choice is the first rank's.
    """

    def __init__(self, stock: Any, cells: CellGraphRunner, config: LapsConfig) -> None:
        self.stock = stock
        self.cells = cells
        self.buckets = Buckets(cells.cells, pad_max=config.graph_pad_max, granule=cells.plan.granule)
        self.gains = Gains(self.buckets, strategy=config.graph_strategy, explore_every=config.graph_explore_every)
        self.demand = Demand(config.graph_window)
        self.why: Counter[str] = Counter()
        self.rows = 0
        self.padded = 0
        self.replaced = 0
        self._config = config
        self._ranks = cells.ranks
        self._clock = clock_for(cells.device)
        self._choice: tuple[ForwardBatch, Batch, Cell | None] | None = None
        self._swapped_at = 0
        self._may_swap = config.graph_swaps > 0
        if not config.graph_always:
            for cell in cells.cells:
                self.gains.seed(cell, *cells.rehearse(cell))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stock"], name)

    # -- the contract of a prefill graph runner

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        """Whether a cell or the stock graphs run this batch."""
        self._choice = None
        batch = self._covered(forward_batch)
        if batch is not None:
            cell = self._choose(forward_batch, batch)
            self._choice = forward_batch, batch, cell
            self.demand.note(batch, cell)
            if cell is not None:
                self.rows += cell.tokens
                self.padded += cell.tokens - batch.tokens
                return True
        return self.stock is not None and bool(self.stock.can_run_graph(forward_batch))

    def execute(self, forward_batch: ForwardBatch, **kwargs: Any) -> Any:
        """Run a batch ``can_run_graph`` has just accepted."""
        if self._choice and self._choice[0] is forward_batch and self._choice[2] is not None:
            return self.cells.replay(forward_batch, self._choice[2], **kwargs)
        return self.stock.execute(forward_batch, **kwargs)

    # -- the choice

    def _covered(self, forward_batch: ForwardBatch) -> Batch | None:
        """The batch as the grid sees it, if it is of a kind and size that cells may serve. The same on every rank."""
        if (
            forward_batch.forward_mode != ForwardMode.EXTEND
            or forward_batch.extend_seq_lens_cpu is None
            or forward_batch.extend_prefix_lens_cpu is None
            or forward_batch.token_indices_to_pool is not None
            or forward_batch.contains_mm_inputs()
        ):
            return None
        roof = self.cells.plan.roof
        if forward_batch.batch_size > roof.batch or len(forward_batch.input_ids) > roof.tokens:
            return None
        batch = Batch.of(map(int, forward_batch.extend_seq_lens_cpu), map(int, forward_batch.extend_prefix_lens_cpu))
        return batch if batch.longest <= roof.length and batch.tokens == len(forward_batch.input_ids) else None

    def _choose(self, forward_batch: ForwardBatch, batch: Batch) -> Cell | None:
        covering = self.buckets.covering(batch)
        if not covering:
            self.why["no-cell"] += 1
            return None
        if self._config.graph_always:
            choice = Choice(covering[0], "always")
        else:
            choice = self.gains.choose(batch) if self._ranks.first else Choice(None, "led")
        at = self._ranks.agree(covering.index(choice.cell) if choice.cell else -1)
        cell = covering[at] if at >= 0 else None
        if cell is not None and not self.cells.can_replay(forward_batch, cell):
            choice, cell = Choice(None, "unsupported"), None
        self.why[choice.why] += 1
        return cell

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around one forward: what it took goes to the estimates, if it was one the cells cover."""
        if not self._ranks.first:
            yield
            return
        self._learn()
        self._choice = None
        start = self._clock.start()
        yield
        if self._choice is not None:
            _, batch, cell = self._choice
            self._choice = None
            self._clock.stop(start, (batch, cell))

    def _learn(self) -> None:
        for (batch, cell), seconds in self._clock.drain():
            if cell is None:
                self.gains.saw_stock(batch, seconds)
            elif cell in self.cells.seconds:
                self.gains.saw_cell(cell, batch, seconds)

    # -- replacement

    def idle(self) -> None:
        """Replace up to ``graph_swaps`` dead cells, at most once per window of batches.

        Counts batches and reads no clock, so all ranks do it in the same round.
        """
        if not self._may_swap or self.demand.total - self._swapped_at < self._config.graph_window:
            return
        self._swapped_at = self.demand.total
        plan = self.cells.plan
        swaps = self.demand.swaps(
            self.buckets.cells,
            plan.candidates,
            most=self._config.graph_swaps,
            pad_max=self._config.graph_pad_max,
            granule=plan.granule,
            protect=self.buckets.cells[-1:],
        )
        for dead, wanted in swaps:
            self._swap(dead, wanted)

    def _swap(self, dead: Cell, wanted: Cell) -> None:
        self.buckets.replace(dead, None)
        self.cells.discard(dead)
        self.gains.forget(dead)
        self.demand.forget(dead)
        try:
            self.cells.capture_more(wanted)
        except Exception as e:
            self._may_swap = False
            logger.warning("LAPS graphs: cell %s could not replace %s, no more are replaced: %s", wanted, dead, e)
            return
        if wanted not in self.cells.seconds:
            return
        self.gains.seed(wanted, *self.cells.rehearse(wanted))
        self.buckets.replace(None, wanted)
        self.replaced += 1
        logger.info("LAPS graphs: cell %s replaced %s.", wanted, dead)

    # -- what it says of itself

    def status(self) -> dict[str, Any]:
        """Counters since start, JSON-ready; times in seconds, memory in MiB, rows in tokens."""
        done = sum(self.why.values())
        return {
            "on": True,
            "cells": [str(c) for c in self.buckets.cells],
            "capture_s": round(self.cells.total_s, 3),
            "capture_mib": round(sum(self.cells.mib.values()), 1),
            "batches": done,
            "replayed": self.demand.hits,
            "hit_rate": round(self.demand.hits / done, 4) if done else 0.0,
            "rows": self.rows,
            "padded_rows": self.padded,
            "padded_share": round(self.padded / self.rows, 4) if self.rows else 0.0,
            "why": dict(self.why),
            "hits": {str(c): n for c in self.buckets.cells if (n := self.demand.of(c))},
            "replaced": self.replaced,
        }


def build(model_runner: Any, config: LapsConfig) -> tuple[PrefillFront | None, str]:
    """Capture the cells of a model runner whose own graphs are captured. Returns the front, or None and the reason."""
    reason = _unsupported(model_runner)
    if reason:
        return None, reason
    emulated = emulation()
    seam = seam_for(model_runner.attn_backend, emulated=emulated is not None)
    if isinstance(seam, str):
        return None, seam
    chunk = get_schedule().chunked_prefill_size
    limits = Limits(
        tokens=chunk if chunk and chunk > 0 else config.graph_max_tokens,
        length=model_runner.model_config.context_len,
        slots=model_runner.req_to_token_pool.size,
        granule=get_cuda_graph_max_batch_size(1),
        shaped=seam.shaped,
    )
    plan = make_plan(config, limits)
    if plan is None:
        return None, "no cell of the grid fits this server"
    ranks = ranks_of_this_server()

    def cells_runner(mr: Any) -> CellGraphRunner:
        return CellGraphRunner(mr, plan, seam, ranks, emulated)

    stock = model_runner.prefill_cuda_graph_runner
    try:
        # SGLang's own set-up checks the model and collects its layers; only the runner it makes is ours.
        with full_graph_config(plan), _made_by(cells_runner):
            made = cuda_graph_setup.capture_prefill_graph(
                model_runner=model_runner, eager_runner=model_runner.eager_runner
            )
        runner = getattr(made, "runner", None)
        if not isinstance(runner, CellGraphRunner):
            return None, "SGLang cannot capture full prefill graphs of this model (see the line above)"
        front = PrefillFront(stock, runner, config)
    except Exception as e:
        logger.debug("prefill cell capture failed", exc_info=True)
        return None, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}"
    logger.info(
        "LAPS graphs: %d of %d cells captured in %.1f s, %.0f MiB%s.",
        len(runner.cells),
        len(plan.candidates),
        runner.total_s,
        sum(runner.mib.values()),
        " (emulated)" if emulated else "",
    )
    return front, ""


@contextmanager
def _made_by(runner: Callable[[Any], CellGraphRunner]) -> Iterator[None]:
    held = cuda_graph_setup.PrefillCudaGraphRunner
    cuda_graph_setup.PrefillCudaGraphRunner = runner
    try:
        yield
    finally:
        cuda_graph_setup.PrefillCudaGraphRunner = held


def _unsupported(model_runner: Any) -> str | None:
    """A feature the cells cannot be combined with, or None."""
    parallel = get_parallel()
    checks = (
        (model_runner.device != "cuda" and emulation() is None, f"device {model_runner.device} has no graph capture"),
        (parallel.pp_size > 1, "pipeline parallelism"),
        (parallel.attn_dp_enabled, "data-parallel attention"),
        (parallel.enable_prefill_cp, "context parallelism"),
        (not model_runner.spec_algorithm.is_none(), "speculative decoding"),
        (model_runner.lora_manager is not None, "LoRA"),
        (not model_runner.is_generation, "a model that does not generate"),
        (model_runner.model_config.quantization not in WEIGHT_ONLY, "quantized activations"),
        (model_runner.model_config.is_encoder_decoder, "an encoder-decoder model"),
        (get_exec().overlap.enable_two_batch_overlap, "two-batch overlap"),
        (get_disagg().enable_pdmux, "PD multiplexing"),
    )
    return next((why for hit, why in checks if hit), None)
