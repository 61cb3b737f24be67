"""A paused pass finds its state again when other batches have run in its pause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.layers import layernorm_sp
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, has_forward_context
from sglang.srt.runtime_context import get_forward
from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleWorkerV2
from sglang_laps import put_back, slices
from toy_model import Runner, batch


def run(runner: Runner, b: Any, pause: Any) -> None:
    """Run this batch in slices of a layer."""
    with slices.Slices(runner).cut(1.0, pause):
        runner.forward(b)


def go_on(runner: Runner, b: Any, between: Callable[[], None] = lambda: None) -> None:
    """Hold what a pass of `b` needs, let something happen, and put it back."""
    with runner.context():
        before = put_back.save_state(b)
        between()
        put_back.put_back(runner, b, before)


def test_what_sees_what_in_a_picture_is_put_back_after_a_pause() -> None:
    runner = Runner(3)

    def metadata(b: Any) -> None:
        runner.attn_backend.forward_metadata = SimpleNamespace(of=b, custom_mask=None, mask_indptr=None)

    runner.attn_backend.init_forward_metadata = metadata
    long = batch((100, 0))
    metadata(long)
    runner.attn_backend.forward_metadata.custom_mask = "of a picture"
    seen = []

    def pause(left: float) -> bool:
        metadata(batch((5, 0)))
        seen.append(left)
        return len(seen) == 1

    attention = runner.attn_backend
    runner.model.layers[2].register_forward_pre_hook(lambda *_: seen.append(vars(attention.forward_metadata)))
    run(runner, long, pause)
    assert seen[1] == {"of": long, "custom_mask": "of a picture", "mask_indptr": None}


def test_a_pass_goes_on_with_the_attention_that_it_has_begun_with() -> None:
    """Adaptive speculative decoding gives the runner another with each number of steps."""
    runner, other = Runner(3), SimpleNamespace(init_forward_metadata=lambda _: runner.ran.append("of the other"))

    def pause(_: float) -> bool:
        runner.attn_backend = other
        return True

    run(runner, batch((100, 0)), pause)
    assert runner.ran.count("metadata 100") == 2
    assert "of the other" not in runner.ran


def test_slots_of_states_are_translated_once() -> None:
    runner, mine = Runner(2), batch((7, 0))
    linear = SimpleNamespace(forward_metadata="mine")
    mine.mamba_track_indices = [1]

    def metadata(b: Any) -> None:
        linear.forward_metadata, b.mamba_track_indices = "new", [10 * i for i in b.mamba_track_indices]

    runner.attn_backend = SimpleNamespace(init_forward_metadata=metadata, linear_attn_backend=linear)
    go_on(runner, mine)
    assert (linear.forward_metadata, mine.mamba_track_indices) == ("mine", [1])


def test_experts_are_not_placed_anew_in_a_pause() -> None:
    runner: Any = Runner(2)
    runner.eplb_manager = "manager"
    with put_back.aside(runner):
        assert runner.eplb_manager is None
    assert runner.eplb_manager == "manager"


def test_flags_of_the_paused_pass_are_put_aside() -> None:
    context: Any = ForwardContext(attn_backend=SimpleNamespace())  # type: ignore[call-arg]
    with forward_context(context), get_forward().scoped(mlp_reduce_scatter=True, multi_stream=True):
        with put_back.aside(Runner(2)):
            assert not has_forward_context()
            assert (get_forward().mlp_reduce_scatter, get_forward().multi_stream) == (False, False)
            get_forward().set("is_extend_in_batch", True)
        assert has_forward_context()
        assert (get_forward().mlp_reduce_scatter, get_forward().multi_stream) == (True, True)
        assert get_forward().is_extend_in_batch is False


def test_adapters_are_put_back() -> None:
    runner, mine = Runner(2), batch((7, 0))
    runner.lora_manager = SimpleNamespace(prepare_lora_batch=lambda b: runner.ran.append("adapters"))
    go_on(runner, mine)
    assert runner.ran == ["adapters", "metadata 7"]


@pytest.mark.parametrize(("chunks", "planned"), [(None, False), (0, True), (3, True)])
def test_how_latent_attention_reads_a_prefix_is_planned_again(chunks: int | None, planned: bool) -> None:
    runner, mine = Runner(2), batch((7, 9000))
    mine.num_prefix_chunks = chunks
    runner.attn_backend.init_mha_chunk_metadata = lambda b: runner.ran.append(f"prefix of {b.num_prefix_chunks}")
    go_on(runner, mine)
    assert runner.ran == ["metadata 7", *([f"prefix of {chunks}"] if planned else [])]


def test_so_it_is_for_each_part_of_a_batch_that_runs_as_two() -> None:
    runner, mine = Runner(2), batch((7, 9000))
    mine.tbo_children = [SimpleNamespace(num_prefix_chunks=n) for n in (2, None)]

    def backend(name: str) -> SimpleNamespace:
        return SimpleNamespace(init_mha_chunk_metadata=lambda b: runner.ran.append(f"{name}: {b.num_prefix_chunks}"))

    runner.attn_backend.children = [backend("first"), backend("second")]
    go_on(runner, mine)
    assert runner.ran == ["metadata 7", "first: 2"]


def test_scales_that_attention_is_about_to_take_are_put_back() -> None:
    runner, mine = Runner(2), batch((7, 0))

    def metadata(_: Any) -> None:
        runner.attn_backend.forward_metadata = SimpleNamespace(hpc_q_scale=None, hpc_split_k_flag=None)

    runner.attn_backend.init_forward_metadata = metadata
    metadata(mine)
    runner.attn_backend.forward_metadata.hpc_q_scale = "mine"
    go_on(runner, mine)
    assert vars(runner.attn_backend.forward_metadata) == {"hpc_q_scale": "mine", "hpc_split_k_flag": None}


def test_tokens_that_ranks_divide_for_layer_normalization_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layernorm_sp._sp_state, "num_tokens", 7)
    go_on(Runner(2), batch((7, 0)), lambda: layernorm_sp.set_sp_num_tokens(3))
    assert layernorm_sp.sp_num_tokens() == 7


def test_lengths_of_gathers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, mine, seen = Runner(2), batch((7, 0)), []
    monkeypatch.setattr("sglang_laps.put_back.dp_attention.set_dp_buffer_len_from_batch", lambda b: seen.append(b))
    mine.global_num_tokens_cpu, mine.is_extend_in_batch = [7, 3], True
    go_on(runner, mine)
    assert seen == [mine]
    assert get_forward().is_extend_in_batch is True
    get_forward().set("is_extend_in_batch", False)


def test_buffers_that_batches_share_are_not_those_of_a_pass_in_slices() -> None:
    @dataclass
    class Batch:
        extend_seq_lens_cpu: list[int]
        extend_prefix_lens_cpu: list[int]

    runner = Runner(2)
    runner.eager_runner.load_batch = lambda b: "shared"
    cutter, mine = slices.Slices(runner), Batch([9], [0])
    assert runner.eager_runner.load_batch(mine) == "shared"
    seen: list[Any] = []
    runner.model.register_forward_pre_hook(lambda *_: seen.append(runner.eager_runner.load_batch(mine)))
    mine.x = batch((9, 0)).x  # type: ignore[attr-defined]
    with cutter.cut(1.0, lambda _: False):
        runner.forward(mine)
    assert seen[0] == mine
    assert seen[0] is not mine


def test_memory_is_reused_after_the_draft_of_a_paused_pass() -> None:
    """A decode step in the pause has staged its draft, and leaves a flag behind."""
    worker: Any = object.__new__(MultiLayerEagleWorkerV2)
    worker._target_worker = SimpleNamespace(model_runner="target")
    worker._draft_worker = SimpleNamespace(draft_runner="draft", last_draft_extend_staged=True)
    assert worker.last_shared_read_runner == "target"
    put_back.wait_for_draft(worker)
    assert worker.last_shared_read_runner == "draft"
    put_back.wait_for_draft(object())
