"""One ModelRunner in this process, driven batch by batch without a scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark.rig.servers import free_port


def boot(model: Path, *flags: str) -> Any:
    """Return a ModelRunner with its pools, attention backends, graphs and SGLang's dummy weights. Call this once per
    process. ``flags``: further server options."""
    from sglang.benchmark import one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    argv = ["--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"]
    argv += ["--nccl-port", str(free_port()), "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    server_args = prepare_server_args([*argv, *flags])
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    ports = PortArgs.init_new(server_args)
    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=ports.nccl_port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=server_args.mem_fraction_static,
        gpu_id=0,
        nccl_port=ports.nccl_port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def request(rid: str, ids: Sequence[int]) -> Any:
    """Return a greedy request for one more token after ``ids``."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(
        rid=rid,
        origin_input_text="",
        origin_input_ids=array("q", ids),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.extend_end = len(req.origin_input_ids)
    return req


def forward_batch(runner: Any, reqs: list[Any]) -> Any:
    """Return the ForwardBatch of one prefill; its KV slots are taken from the pool."""
    from sglang.benchmark.one_batch import TreeCacheNamespace
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    batch = ScheduleBatch.init_new(
        reqs=reqs,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=TreeCacheNamespace(
            page_size=runner.page_size,
            device=runner.device,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        ),
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
    return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)


def clear(runner: Any) -> None:
    """Free every request slot and KV slot."""
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()


def synchronize(runner: Any) -> None:
    torch.get_device_module(runner.device).synchronize()
