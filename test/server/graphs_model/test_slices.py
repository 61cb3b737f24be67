"""A pass in slices: where it pauses, how far the host is ahead, what is put back, and that it comes out the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laps_core.slicing import MIN_ROWS
from sglang.srt.runtime_context import get_forward
from sglang_laps import put_back, slices
from sglang_laps.armed import Abandoned
from sglang_laps.layers import NoLayers, decoder_layers
from sglang_laps.marks import Marks
from toy_model import HIDDEN, Model, Runner, batch

ROWS = 2 * MIN_ROWS


def noting(told: Callable[[float], None]) -> Callable[[float], bool]:
    """A pause in which nothing runs; passes the layers left to `told`."""

    def pause(left: float) -> bool:
        told(left)
        return False

    return pause


def sliced(runner: Runner, layers: float, b: Any, pause: Any = lambda _: False) -> torch.Tensor:
    cutter = slices.Slices(runner)
    with cutter.cut(layers, pause):
        return runner.forward(b)


@pytest.mark.parametrize(("layers", "pauses"), [(1.0, 3), (2.0, 1), (3.0, 1), (4.0, 0), (9.0, 0)])
def test_a_slice_is_as_many_layers_as_asked_for(layers: float, pauses: int) -> None:
    left: list[float] = []
    sliced(Runner(4), layers, batch((40, 7)), noting(left.append))
    assert left == [4 - k * layers for k in range(1, pauses + 1)]


def test_within_a_layer_it_pauses_between_operators_and_blocks_of_rows() -> None:
    runner = Runner(2)
    whole = runner.forward(batch((ROWS, 0)))
    runner.ran.clear()
    got = sliced(runner, 0.01, batch((ROWS, 0)), noting(lambda _: runner.ran.append("pause")))
    mlp = [f"mlp {MIN_ROWS}", "pause", f"mlp {MIN_ROWS}"]
    layer = ["pause", "attention", "pause", "pause", *mlp]
    assert runner.ran == [*layer, "pause", *layer]
    torch.testing.assert_close(got, whole)


def test_an_encoder_before_the_layers_is_paused_too_and_none_of_them_is_done() -> None:
    runner = Runner(2, encoder=3)
    whole = runner.forward(batch((40, 7)))
    runner.ran.clear()

    pause = noting(lambda left: runner.ran.append(f"{left} left"))
    torch.testing.assert_close(sliced(runner, 0.01, batch((40, 7)), pause), whole)
    assert runner.ran[:6] == ["encoder 40", "2.0 left"] * 3, "before the first layer of the decoder, too"
    runner.ran.clear()
    sliced(runner, 2.0, batch((40, 7)), pause)
    assert runner.ran[:4] == ["encoder 40"] * 3 + ["attention"], "slices are as long as the decoder's"


@pytest.mark.parametrize("why", ["each rank has pictures of its own", "graphs"])
def test_an_encoder_that_ranks_divide_or_that_is_captured_runs_whole(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(2, encoder=3)
    if why == "graphs":
        monkeypatch.setenv("SGLANG_VIT_ENABLE_CUDA_GRAPH", "1")
    else:
        runner.server_args.mm_enable_dp_encoder = True
    sliced(runner, 0.01, batch((40, 7)), noting(lambda _: runner.ran.append("pause")))
    assert runner.ran[:3] == ["encoder 40"] * 3


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
    sliced(runner, 1.0, long, pause)
    assert seen[1] == {"of": long, "custom_mask": "of a picture", "mask_indptr": None}


def test_a_pass_goes_on_with_the_attention_that_it_has_begun_with() -> None:
    """Adaptive speculative decoding gives the runner another with each number of steps."""
    runner, other = Runner(3), SimpleNamespace(init_forward_metadata=lambda _: runner.ran.append("of the other"))

    def pause(_: float) -> bool:
        runner.attn_backend = other
        return True

    sliced(runner, 1.0, batch((100, 0)), pause)
    assert runner.ran.count("metadata 100") == 2
    assert "of the other" not in runner.ran


def test_slots_of_states_are_translated_once() -> None:
    runner, mine = Runner(2), batch((7, 0))
    linear = SimpleNamespace(forward_metadata="mine")
    mine.mamba_track_indices = [1]

    def metadata(b: Any) -> None:
        linear.forward_metadata, b.mamba_track_indices = "new", [10 * i for i in b.mamba_track_indices]

    runner.attn_backend = SimpleNamespace(init_forward_metadata=metadata, linear_attn_backend=linear)
    with runner.context():
        put_back.put_back(runner, mine, put_back.hold(mine))
    assert (linear.forward_metadata, mine.mamba_track_indices) == ("mine", [1])


@pytest.mark.parametrize("rows", [(40, 0, ROWS), (0, 40, 3)], ids=("busy", "idle"))
def test_ranks_pause_at_the_same_layers_whatever_each_computes(rows: tuple[int, ...]) -> None:
    for n in rows:
        runner = Runner(5)
        left: list[float] = []
        b = batch((n, 0)) if n else batch()
        whole = runner.forward(b)
        cutter = slices.Slices(runner)
        with cutter.cut(0.0, noting(left.append), 3):
            torch.testing.assert_close(runner.forward(b), whole)
        assert left == [3.0, 2.0], "before the third layer and the fourth"


def test_a_pass_that_nobody_waits_for_ends_in_its_pause_and_the_next_runs_whole() -> None:
    runner, b = Runner(4), batch((40, 7), (3, 0))
    b.batch_size = 2

    def pause(left: float) -> bool:
        raise Abandoned

    out: Any = sliced(runner, 2.0, b, pause)
    assert out.logits_output.next_token_logits.shape == (2, runner.model_config.vocab_size)
    assert runner.ran == ["attention", "mlp 43"] * 2
    assert runner.prefill_cuda_graph_runner == "graphs"
    runner.ran.clear()
    runner.forward(batch((40, 7)))
    assert runner.ran == ["attention", "mlp 40"] * 4


def test_with_drafts_a_pass_ends_in_a_pause_once_it_is_known_what_they_follow() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang_laps.abandoned import NoResult

    runner = Runner(4)
    runner.spec_algorithm = SpeculativeAlgorithm.EAGLE3
    result = NoResult(runner)
    for states, known in ((None, False), (torch.ones(7, 3 * HIDDEN), True)):
        result.learn(SimpleNamespace(logits_output=SimpleNamespace(hidden_states=states)))
        assert result.known == known
    output: Any = result.of(SimpleNamespace(batch_size=2, input_ids=torch.zeros(43)))
    assert output.logits_output.next_token_logits.shape == (2, runner.model_config.vocab_size)
    assert output.logits_output.hidden_states.shape == (43, 3 * HIDDEN)
    for algorithm in (SpeculativeAlgorithm.NONE, SpeculativeAlgorithm.STANDALONE):
        runner.spec_algorithm = algorithm
        assert NoResult(runner).known


def test_a_pass_as_a_whole_pauses_nowhere_and_keeps_its_graphs() -> None:
    runner, seen = Runner(3), []
    slices.Slices(runner)
    runner.model.register_forward_pre_hook(lambda *_: seen.append(runner.prefill_cuda_graph_runner))
    runner.forward(batch((ROWS, 0)))
    assert (runner.ran, seen) == (["attention", f"mlp {ROWS}"] * 3, ["graphs"])


def test_in_slices_there_are_no_graphs_but_in_the_pauses() -> None:
    runner, seen = Runner(3), []
    runner.model.register_forward_pre_hook(lambda *_: seen.append(runner.prefill_cuda_graph_runner))

    def pause(left: float) -> bool:
        runner.forward(batch((5, 0)))
        return True

    sliced(runner, 1.0, batch((100, 0)), pause)
    assert (seen, runner.prefill_cuda_graph_runner) == ([None, "graphs", "graphs"], "graphs")


def test_what_ran_in_a_pause_has_its_metadata_replaced_and_only_then() -> None:
    runner = Runner(4)
    sliced(runner, 1.0, batch((100, 0)), lambda left: left == 2.0)
    assert [x for x in runner.ran if x.startswith("metadata")] == ["metadata 100"]


def test_batches_in_slices_within_a_pause() -> None:
    runner = Runner(3)
    cutter, seen = slices.Slices(runner), []
    want = [runner.forward(batch((100, 0))), runner.forward(batch((30, 0)))]

    def inner(left: float) -> bool:
        seen.append(("inner", left))
        return False

    def outer(left: float) -> bool:
        seen.append(("outer", left))
        if left < 2.0:
            return False
        with cutter.cut(2.0, inner):
            torch.testing.assert_close(runner.forward(batch((30, 0))), want[1])
        return True

    with cutter.cut(1.0, outer):
        torch.testing.assert_close(runner.forward(batch((100, 0))), want[0])
    assert seen == [("outer", 2.0), ("inner", 1.0), ("outer", 1.0)]


def test_a_pause_that_fails_leaves_nothing_behind() -> None:
    runner = Runner(3)
    cutter = slices.Slices(runner)

    def pause(_: float) -> bool:
        raise RuntimeError("a pause")

    with pytest.raises(RuntimeError, match="a pause"), cutter.cut(1.0, pause):
        runner.forward(batch((100, 0)))
    assert runner.prefill_cuda_graph_runner == "graphs"
    runner.ran.clear()
    runner.forward(batch((100, 0)))
    assert runner.ran == ["attention", "mlp 100"] * 3


def test_a_model_that_does_not_call_its_layers_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(3)
    cutter = slices.Slices(runner)
    runner.model.forward = lambda x: x
    for _ in range(2):
        with cutter.cut(1.0, lambda _: False):
            runner.forward(batch((100, 0)))
    assert [r.getMessage() for r in caplog.records] == [
        "LAPS: Model does not call its layers as modules: long batches do not pause."
    ]


# -- a device that runs behind the host


class Device:
    """Work takes its time one after the other, on a clock of its own; an event waits for what was launched before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.free = 0.0
        monkeypatch.setattr(slices, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(torch, "get_device_module", self.module)

    def launch(self, seconds: float, host_s: float = 0.0) -> None:
        """Give it work; the host needs `host_s` for that."""
        self.now += host_s
        self.free = max(self.free, self.now) + seconds

    def module(self, *_: str) -> Any:
        """Stand-in for ``torch.cuda``."""
        device = self

        class Event:
            at = 0.0

            def __init__(self, enable_timing: bool = False) -> None:
                pass

            def record(self, stream: Any = None) -> None:
                self.at = max(device.free, device.now)

            def synchronize(self) -> None:
                device.now = max(device.now, self.at)

            def elapsed_time(self, end: Any) -> float:
                if max(self.at, end.at) > device.now:
                    raise RuntimeError("Both events must be completed before calculating elapsed time.")
                return float(end.at - self.at) * 1e3

        return SimpleNamespace(Event=Event)

    def runner(self, layers: int, layer_s: float, host_s: float = 0.0) -> Runner:
        """A runner whose layers take ``layer_s`` on the device each."""
        runner = Runner(layers, "cuda")
        for layer in runner.model.layers:
            layer.register_forward_hook(lambda *_: self.launch(layer_s, host_s))
        return runner


def test_the_host_is_one_slice_ahead_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    ahead: list[float] = []
    pause = noting(lambda _: ahead.append(device.free - device.now))
    sliced(device.runner(6, 0.02, host_s=0.001), 1.0, batch((100, 0)), pause)
    assert len(ahead) == 5
    assert ahead == pytest.approx([0.02] * 5)


def test_times_between_marks_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches sent at once: the second begins when the first has ended. A result may be there before the mark."""
    device = Device(monkeypatch)
    marks, found = Marks(device.module(), None), []
    for seconds in (0.0, 0.03, 0.05):
        device.launch(seconds)
        found.append(marks.now())
    assert marks.seconds(found[0], found[1]) == pytest.approx(0.03)
    assert marks.seconds(found[1], found[2]) == pytest.approx(0.05)


def test_a_launch_takes_what_its_slices_and_pauses_take(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    runner = device.runner(8, 0.05, host_s=0.002)
    cutter = slices.Slices(runner)
    assert cutter.launch_s == 0.0

    def pause(_: float) -> bool:
        device.now += 0.004
        return False

    with cutter.cut(2, pause):
        runner.forward(batch((100, 0)))
    assert cutter.launch_s == pytest.approx(8 * 0.002 + 4 * 0.004), "without the wait for the device"


def test_a_pause_costs_what_it_takes_where_nothing_computes_meanwhile() -> None:
    runner = Runner(4)
    cutter = slices.Slices(runner)
    assert cutter.pause_s == 0.0
    took = iter((0.2, 0.01, 0.01))

    def pause(_: float) -> bool:
        time.sleep(next(took))
        return False

    with cutter.cut(1, pause):
        runner.forward(batch((100, 0)))
    assert 0.005 < cutter.pause_s < 0.1, "the first of a pass takes in results"


# -- what is put back


def test_flags_of_the_paused_pass_are_put_aside() -> None:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, has_forward_context
    from sglang.srt.runtime_context import get_forward

    context: Any = ForwardContext(attn_backend=SimpleNamespace())  # type: ignore[call-arg]
    with forward_context(context), get_forward().scoped(mlp_reduce_scatter=True, multi_stream=True):
        with put_back.aside():
            assert not has_forward_context()
            assert (get_forward().mlp_reduce_scatter, get_forward().multi_stream) == (False, False)
            get_forward().set("is_extend_in_batch", True)
        assert has_forward_context()
        assert (get_forward().mlp_reduce_scatter, get_forward().multi_stream) == (True, True)
        assert get_forward().is_extend_in_batch is False


def test_adapters_and_prepared_batches_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, mine = Runner(2), batch((7, 0))
    runner.lora_manager = SimpleNamespace(prepare_lora_batch=lambda b: runner.ran.append("adapters"))
    runner.model.prepare_forward_batch = lambda b: runner.ran.append("prepared")
    with runner.context():
        put_back.put_back(runner, mine, put_back.hold(mine))
    assert runner.ran == ["adapters", "prepared", "metadata 7"]


def test_lengths_of_gathers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, mine, seen = Runner(2), batch((7, 0)), []
    monkeypatch.setattr("sglang_laps.put_back.dp_attention.set_dp_buffer_len_from_batch", lambda b: seen.append(b))
    mine.global_num_tokens_cpu, mine.is_extend_in_batch = [7, 3], True
    with runner.context():
        put_back.put_back(runner, mine, put_back.hold(mine))
    assert seen == [mine]
    assert get_forward().is_extend_in_batch is True
    get_forward().set("is_extend_in_batch", False)


def test_buffers_that_batches_share_are_not_those_of_a_pass_in_slices() -> None:
    from dataclasses import dataclass

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


# -- which models


def test_layers_are_those_that_hold_all_attention() -> None:
    model = Model(5, lambda _: None)
    wrapped = torch.nn.Module()
    wrapped.visual = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(5))
    wrapped.stages = torch.nn.ModuleList([model])
    assert decoder_layers(wrapped) == list(model.layers)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (torch.nn.Linear(2, 2), "Linear has no attention layers"),
        (torch.nn.Sequential(Model(2, print), Model(2, print)), "the attention of Sequential is not in one list of"),
        (Model(1, print), "Model has one layer"),
    ],
)
def test_why_a_model_has_no_slices(model: torch.nn.Module, why: str) -> None:
    with pytest.raises(NoLayers, match=why):
        decoder_layers(model)
