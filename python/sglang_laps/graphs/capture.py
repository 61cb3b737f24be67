"""Capture of the ladder's graphs after SGLang's own graphs, and timing of both paths back to back."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from laps_core.config import LapsConfig
from laps_core.ladder import MOST_ROWS, Ladder
from sglang.srt.model_executor.cuda_graph_config import Backend, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel, get_schedule
from sglang.srt.utils import get_cuda_graph_max_batch_size

from sglang_laps.graphs.front import PrefillFront
from sglang_laps.passes.slices import ROWS_APART
from sglang_laps.temporarily import temporarily

logger = logging.getLogger(__name__)

REPEATS = 9
"""Forward passes of each path for each row count; the first warms up, the median of the others counts."""


def build(runner: Any, config: LapsConfig, backends: Mapping[str, Sequence[str]]) -> PrefillFront | str:
    """Return the front of a model runner, or why it has none. ``backends``: supported attention backends by device."""
    if reason := _unsupported(runner, backends):
        return reason
    chunk, slots = get_schedule().chunked_prefill_size, runner.req_to_token_pool.size
    most, multiple = min(chunk if chunk and chunk > 0 else MOST_ROWS, MOST_ROWS), get_cuda_graph_max_batch_size(1)
    ladder = Ladder.of(config, tokens=most, length=runner.model_config.context_len, slots=slots, multiple=multiple)
    if ladder is None:
        return "no row count of the flags fits this server"
    logger.warning("LAPS captures prefill graphs of the backend 'full', which SGLang calls experimental: use breakable"
                   " (leave --enable-batch-prefill-cuda-graph out) for production workloads.")  # fmt: skip
    stock, group = runner.prefill_cuda_graph_runner, get_parallel().tp_group
    rows = list(ladder.rows)
    full_graphs = PhaseConfig(backend=Backend.FULL, bs=rows, max_bs=rows[-1], full_prefill_max_req=ladder.slots)
    try:
        with temporarily(get_exec().graph.cuda_graph_config, prefill=full_graphs):
            made = cuda_graph_setup.capture_prefill_graph(model_runner=runner, eager_runner=runner.eager_runner)
        full: Any = getattr(made, "runner", None)
        if not hasattr(full, "capture_num_tokens"):
            return "SGLang cannot capture full prefill graphs of this model (see the line above)"
        ladder = replace(ladder, rows=tuple(full.capture_num_tokens))  # SGLang can leave some out
        always = config.graph_strategy == "always"
        times = {n: (1.0, 0.0) if always else _times(runner, stock, full, ladder.sample(n)) for n in ladder.rows}
    except Exception as e:
        if group.world_size > 1:
            raise  # the other ranks wait for this rank during their captures
        logger.debug("prefill graph capture failed", exc_info=True)
        return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}"
    finally:
        runner.prefill_cuda_graph_runner = stock
    ladder = group.broadcast_object(ladder.with_times(times))
    cost = {"capture_s": round(made.capture_time, 3), "capture_mib": round(made.memory_usage_gb * 1024, 1)}
    faster = ", ".join(map(str, sorted(ladder.faster))) or "none, the stock path is faster"
    logger.info("LAPS graphs: %d row counts captured (%s); replayed: %s.", len(ladder.rows), cost, faster)
    return PrefillFront(stock, full, ladder, cost)


def _unsupported(runner: Any, backends: Mapping[str, Sequence[str]]) -> str | None:
    """Return the feature in use that the graphs do not support, or None. The same on every rank."""
    parallel, device = get_parallel(), runner.device
    attention = getattr(runner.attn_backend, "prefill_backend", runner.attn_backend)
    name, known = type(attention).__name__, backends.get(device, ())
    checks = (
        (device not in backends, f"device {device} has no graph capture"),
        (
            get_exec().graph.cuda_graph_config.prefill.backend == Backend.FULL,
            "SGLang's own prefill graphs use the backend 'full'",
        ),
        (name not in known, f"attention backend {name} is not one of {', '.join(known)}"),
        (getattr(attention, "use_mla", False), "multi-head latent attention"),
        (parallel.pp_size > 1, "pipeline parallelism"),
        (parallel.attn_dp_enabled, "data-parallel attention"),
        (parallel.enable_prefill_cp, "context parallelism"),
        (not runner.spec_algorithm.is_none(), "speculative decoding"),
        (runner.lora_manager is not None, "LoRA"),
        (not runner.is_generation, "a model that does not generate"),
        (runner.model_config.quantization not in ROWS_APART, "quantized activations"),
        (runner.model_config.is_encoder_decoder or runner.model_config.is_multimodal, "more than one modality"),
        (get_exec().overlap.enable_two_batch_overlap, "two-batch overlap"),
        (get_disagg().enable_pdmux, "PD multiplexing"),
    )
    return next((why for hit, why in checks if hit), None)


def _times(runner: Any, stock: Any, full: Any, new: list[int]) -> tuple[float, float]:
    """Return the seconds of a batch with `new` tokens per request: stock path, full graph (inf if not replayed)."""
    took, device = {stock: list[float](), full: list[float]()}, torch.get_device_module(runner.device)
    for _ in range(REPEATS):
        for path, seconds in took.items():
            runner.prefill_cuda_graph_runner, batch = path, _batch(runner, full, new)
            device.synchronize()
            begin = time.perf_counter()
            with torch.no_grad():
                output = runner.forward(batch)
            device.synchronize()
            lost = path is full and not output.can_run_graph
            seconds.append(float("inf") if lost else time.perf_counter() - begin)
    return statistics.median(took[stock][1:]), statistics.median(took[full][1:])


def _batch(runner: Any, full: Any, new: list[int]) -> ForwardBatch:
    """Return requests with `new` tokens each, without history. KV goes to slot 0 (the sink): no other may exist yet.

    The tokens are random, but the same on all ranks: with one token everywhere, few experts of a mixture would be read.
    """
    tokens, count, translator = sum(new), len(new), runner.kv_index_translator
    seeded = torch.Generator("cpu").manual_seed(tokens)
    ids = torch.randint(runner.model_config.vocab_size, (tokens,), generator=seeded, device="cpu").to(runner.device)
    with torch.device(runner.device):
        seq_lens = torch.tensor(new)
        extend, sink = seq_lens.int(), torch.zeros(tokens, dtype=torch.int64)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND, global_forward_mode=ForwardMode.EXTEND, batch_size=count,
            input_ids=ids, positions=torch.cat([torch.arange(n) for n in new]), out_cache_loc=sink,
            req_pool_indices=torch.arange(count), seq_lens=seq_lens, seq_lens_cpu=torch.tensor(new, device="cpu"),
            seq_lens_sum=tokens, orig_seq_lens=extend, extend_num_tokens=tokens, extend_seq_lens=extend,
            extend_seq_lens_cpu=new, extend_prefix_lens=torch.zeros_like(extend), extend_prefix_lens_cpu=[0] * count,
            extend_start_loc=extend.cumsum(0, dtype=torch.int32) - extend, extend_logprob_start_lens_cpu=new,
            capture_hidden_mode=full.capture_hidden_mode,
        )  # fmt: skip
    translator.own_plan(batch).bind(batch, translator)
    return batch
