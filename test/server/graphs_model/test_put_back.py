"""A paused pass finds its state again when other batches have run in its pause."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.layers import layernorm_sp
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, has_forward_context
from sglang.srt.runtime_context import get_forward
from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleWorkerV2
from sglang.srt.utils import device_timer
from sglang_laps.passes import put_back, slices
from sglang_laps.pauses import Pauses
from toy_model import Runner, batch


def run(runner: Runner, b: Any, pause: Any) -> None:
    """Run this batch in slices of a layer."""
    with slices.Slices(runner).cut(1.0, pause):
        runner.forward(b)


def restore_after(runner: Runner, b: Any, between: Callable[[], None] = lambda: None) -> None:
    """Hold what a pass of `b` needs, let something happen, and put it back."""
    with runner.context():
        before = put_back.save_state(b)
        between()
        put_back.put_back(runner, b, before)


def test_custom_attention_mask_is_restored_after_pause() -> None:
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


def test_paused_pass_keeps_attention_backend() -> None:
    """Adaptive speculative decoding gives the runner another with each number of steps."""
    runner, other = Runner(3), SimpleNamespace(init_forward_metadata=lambda _: runner.ran.append("of the other"))

    def pause(_: float) -> bool:
        runner.attn_backend = other
        return True

    run(runner, batch((100, 0)), pause)
    assert runner.ran.count("metadata 100") == 2
    assert "of the other" not in runner.ran


def test_timer_of_device_times_both_the_paused_pass_and_the_pass_in_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--enable-forward-pass-metrics`` and SGLANG_ENABLE_METRICS_DEVICE_TIMER do this."""
    event = SimpleNamespace(record=lambda: None, query=lambda: True, elapsed_time=lambda _: 1000.0)
    device = SimpleNamespace(Event=lambda enable_timing: event, current_stream=lambda: None)
    monkeypatch.setattr(device_timer.torch, "get_device_module", lambda: device)
    runner, reported = Runner(3), []
    runner.device_timer = timer = device_timer.DeviceTimer(lambda t, category: reported.append((category, t)))
    observer = SimpleNamespace(on_interval_start=lambda _: None, on_interval_ready=lambda _: None)

    def timed(category: str, work: Callable[[], object]) -> None:
        capture = timer.capture(observer) if hasattr(timer, "capture") else nullcontext()
        with capture, timer.wrap({"category": category}):
            work()

    def pause(_: float) -> bool:
        timed("short", lambda: None)
        return True

    timed("long", lambda: run(runner, batch((100, 0)), pause))
    timed("next", lambda: None)
    assert reported == [("long", 1.0), *[("short", 1.0)] * 2, ("next", 1.0)]


def test_mamba_state_slots_are_translated_once() -> None:
    runner, mine = Runner(2), batch((7, 0))
    linear = SimpleNamespace(forward_metadata="mine")
    mine.mamba_track_indices = [1]

    def metadata(b: Any) -> None:
        linear.forward_metadata, b.mamba_track_indices = "new", [10 * i for i in b.mamba_track_indices]

    runner.attn_backend = SimpleNamespace(init_forward_metadata=metadata, linear_attn_backend=linear)
    restore_after(runner, mine)
    assert (linear.forward_metadata, mine.mamba_track_indices) == ("mine", [1])


def test_expert_rebalancing_is_disabled_in_pause() -> None:
    runner: Any = Runner(2)
    runner.eplb_manager = "manager"
    with put_back.aside(runner):
        assert runner.eplb_manager is None
    assert runner.eplb_manager == "manager"


def test_forward_flags_of_paused_pass_are_reset_and_restored() -> None:
    context: Any = ForwardContext(attn_backend=SimpleNamespace())  # type: ignore[call-arg]
    with forward_context(context), get_forward().scoped(mlp_reduce_scatter=True, multi_stream=True):
        with put_back.aside(Runner(2)):
            assert not has_forward_context()
            assert (get_forward().mlp_reduce_scatter, get_forward().multi_stream) == (False, False)
            get_forward().set("is_extend_in_batch", True)
        assert has_forward_context()
        assert (get_forward().mlp_reduce_scatter, get_forward().multi_stream) == (True, True)
        assert get_forward().is_extend_in_batch is False


@pytest.mark.parametrize(("slots", "kept"), [(3, {"paused"}), (2, set())])
def test_paused_adapters_stay_loaded_only_if_adapters_of_all_ranks_leave_slots(slots: int, kept: set[str]) -> None:
    """SGLang asserts that all fit. With data-parallel attention, the paused batch loads its adapters again."""
    runner = SimpleNamespace(lora_manager=SimpleNamespace(max_loras_per_batch=slots))
    found: list[set[str]] = []
    fake: Any = SimpleNamespace(
        _scheduler=SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner)), adapters=lambda: {"paused"}
    )
    Pauses._fetch(fake, lambda new, running: found.append(new | running), {"one", "two"})
    assert found == [{"one", "two"} | kept]


def test_lora_adapters_are_restored() -> None:
    runner, mine = Runner(2), batch((7, 0))
    runner.lora_manager = SimpleNamespace(prepare_lora_batch=lambda b: runner.ran.append("adapters"))
    restore_after(runner, mine)
    assert runner.ran == ["adapters", "metadata 7"]


@pytest.mark.parametrize(("chunks", "planned"), [(None, False), (0, True), (3, True)])
def test_mla_prefix_metadata_is_rebuilt_if_used(chunks: int | None, planned: bool) -> None:
    runner, mine = Runner(2), batch((7, 9000))
    mine.num_prefix_chunks = chunks
    runner.attn_backend.init_mha_chunk_metadata = lambda b: runner.ran.append(f"prefix of {b.num_prefix_chunks}")
    restore_after(runner, mine)
    assert runner.ran == ["metadata 7", *([f"prefix of {chunks}"] if planned else [])]


def test_mla_prefix_metadata_is_rebuilt_for_two_batch_overlap() -> None:
    runner, mine = Runner(2), batch((7, 9000))
    mine.tbo_children = [SimpleNamespace(num_prefix_chunks=n) for n in (2, None)]

    def backend(name: str) -> SimpleNamespace:
        return SimpleNamespace(init_mha_chunk_metadata=lambda b: runner.ran.append(f"{name}: {b.num_prefix_chunks}"))

    runner.attn_backend.children = [backend("first"), backend("second")]
    restore_after(runner, mine)
    assert runner.ran == ["metadata 7", "first: 2"]


def test_attention_scales_are_restored() -> None:
    runner, mine = Runner(2), batch((7, 0))

    def metadata(_: Any) -> None:
        runner.attn_backend.forward_metadata = SimpleNamespace(hpc_q_scale=None, hpc_split_k_flag=None)

    runner.attn_backend.init_forward_metadata = metadata
    metadata(mine)
    runner.attn_backend.forward_metadata.hpc_q_scale = "mine"
    restore_after(runner, mine)
    assert vars(runner.attn_backend.forward_metadata) == {"hpc_q_scale": "mine", "hpc_split_k_flag": None}


def test_layernorm_sp_token_count_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layernorm_sp._sp_state, "num_tokens", 7)
    restore_after(Runner(2), batch((7, 0)), lambda: layernorm_sp.set_sp_num_tokens(3))
    assert layernorm_sp.sp_num_tokens() == 7


def test_dp_gather_lengths_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, mine, seen = Runner(2), batch((7, 0)), []
    monkeypatch.setattr(
        "sglang_laps.passes.put_back.dp_attention.set_dp_buffer_len_from_batch", lambda b: seen.append(b)
    )
    mine.global_num_tokens_cpu, mine.is_extend_in_batch = [7, 3], True
    restore_after(runner, mine)
    assert seen == [mine]
    assert get_forward().is_extend_in_batch is True
    get_forward().set("is_extend_in_batch", False)


def test_sliced_pass_does_not_use_shared_batch_buffers() -> None:
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


def test_wait_for_draft_selects_draft_runner() -> None:
    """A decode step in the pause has staged its draft, and leaves a flag behind."""
    worker: Any = object.__new__(MultiLayerEagleWorkerV2)
    worker._target_worker = SimpleNamespace(model_runner="target")
    worker._draft_worker = SimpleNamespace(draft_runner="draft", last_draft_extend_staged=True)
    assert worker.last_shared_read_runner == "target"
    put_back.wait_for_draft(worker)
    assert worker.last_shared_read_runner == "draft"
    put_back.wait_for_draft(object())
