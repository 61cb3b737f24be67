"""A pass in slices: where it pauses, how far the host is ahead, and that it comes out the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laps_core.slicing import MIN_ROWS
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_laps.passes import no_slices, slices
from sglang_laps.passes.cutter import Abandoned
from sglang_laps.passes.layers import NoLayers, decoder_layers, points
from sglang_laps.steps import Marks
from toy_model import HIDDEN, Model, Runner, batch

ROWS = 2 * MIN_ROWS


def make_pause(told: Callable[[float], None]) -> Callable[[float], bool]:
    """Return a pause in which nothing runs, and which passes the layers left to `told`."""

    def pause(left: float) -> bool:
        told(left)
        return False

    return pause


def run_in_slices(runner: Runner, layers: float, b: Any, pause: Any = lambda _: False) -> torch.Tensor:
    cutter = slices.Slices(runner)
    with cutter.cut(layers, pause):
        return runner.forward(b)


@pytest.mark.parametrize(("layers", "pauses"), [(1.0, 3), (2.0, 1), (3.0, 1), (4.0, 0), (9.0, 0)])
def test_slice_has_requested_number_of_layers(layers: float, pauses: int) -> None:
    left: list[float] = []
    run_in_slices(Runner(4), layers, batch((40, 7)), make_pause(left.append))
    assert left == [4 - k * layers for k in range(1, pauses + 1)]


@pytest.mark.parametrize("parts", [0, 4])
def test_looped_model_has_layers_left_in_each_loop(parts: int) -> None:
    """Nanbeige and IQuestLoopCoder run their layers several times."""
    runner, left = Runner(4), list[float]()
    once = runner.model.forward
    runner.model.forward = lambda x: once(once(x))
    cutter = slices.Slices(runner)
    for _ in range(2):
        left.clear()
        with cutter.cut(1.0, make_pause(left.append), parts):
            runner.forward(batch((40, 7)))
    assert left == [3.0, 2.0, 1.0]


def test_short_slice_pauses_between_operators_and_row_blocks() -> None:
    runner = Runner(2)
    whole = runner.forward(batch((ROWS, 0)))
    runner.ran.clear()
    got = run_in_slices(runner, 0.01, batch((ROWS, 0)), make_pause(lambda _: runner.ran.append("pause")))
    mlp = [f"mlp {MIN_ROWS}", "pause", f"mlp {MIN_ROWS}"]
    layer = ["pause", "attention", "pause", "pause", *mlp]
    assert runner.ran == [*layer, "pause", *layer]
    torch.testing.assert_close(got, whole)


def test_encoder_pauses_report_all_decoder_layers_left() -> None:
    runner = Runner(2, encoder=3)
    whole = runner.forward(batch((40, 7)))
    runner.ran.clear()

    pause = make_pause(lambda left: runner.ran.append(f"{left} left"))
    torch.testing.assert_close(run_in_slices(runner, 0.01, batch((40, 7)), pause), whole)
    assert runner.ran[:6] == ["encoder 40", "2.0 left"] * 3, "before the first layer of the decoder, too"
    runner.ran.clear()
    run_in_slices(runner, 2.0, batch((40, 7)), pause)
    assert runner.ran[:4] == ["encoder 40"] * 3 + ["attention"], "slices are as long as the decoder's"


@pytest.mark.parametrize("why", ["each rank has pictures of its own", "graphs"])
def test_divided_or_captured_encoder_runs_without_pause(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(2, encoder=3)
    if why == "graphs":
        monkeypatch.setenv("SGLANG_VIT_ENABLE_CUDA_GRAPH", "1")
    else:
        runner.server_args.mm_enable_dp_encoder = True
    run_in_slices(runner, 0.01, batch((40, 7)), make_pause(lambda _: runner.ran.append("pause")))
    assert runner.ran[:3] == ["encoder 40"] * 3


@pytest.mark.parametrize("rows", [(40, 0, ROWS), (0, 40, 3)], ids=("busy", "idle"))
def test_dp_ranks_pause_at_same_layers_for_any_batch(rows: tuple[int, ...]) -> None:
    for n in rows:
        runner = Runner(5)
        left: list[float] = []
        b = batch((n, 0)) if n else batch()
        whole = runner.forward(b)
        cutter = slices.Slices(runner)
        with cutter.cut(0.0, make_pause(left.append), 3):
            torch.testing.assert_close(runner.forward(b), whole)
        assert left == [3.0, 2.0], "before the third layer and the fourth"


def test_abandoned_pass_ends_in_pause_and_next_runs_whole() -> None:
    runner, b = Runner(4), batch((40, 7), (3, 0))
    b.batch_size = 2

    def pause(left: float) -> bool:
        raise Abandoned

    out: Any = run_in_slices(runner, 2.0, b, pause)
    assert out.logits_output.next_token_logits.shape == (2, runner.model_config.vocab_size)
    assert runner.ran == ["attention", "mlp 43"] * 2
    assert runner.prefill_cuda_graph_runner == "graphs"
    runner.ran.clear()
    runner.forward(batch((40, 7)))
    assert runner.ran == ["attention", "mlp 40"] * 4


def test_abandoned_pass_leaves_no_flag_set() -> None:
    """Layer normalization divided among ranks sets a flag in the first layer and clears it after the last."""
    from sglang.srt.runtime_context import get_forward

    def set_flag(*_: Any) -> None:
        get_forward().set("sp_active", True)

    def pause(left: float) -> bool:
        assert not get_forward().sp_active
        raise Abandoned

    runner, b = Runner(4), batch((40, 7), (3, 0))
    b.batch_size = 2
    runner.model.layers[0].register_forward_pre_hook(set_flag)
    run_in_slices(runner, 2.0, b, pause)
    assert not get_forward().sp_active


def test_abandoned_result_with_drafts_needs_hidden_state_width() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang_laps.passes.slices import NoResult

    runner = Runner(4)
    runner.spec_algorithm = SpeculativeAlgorithm.EAGLE3
    result = NoResult(runner)
    for states, known in ((None, False), (torch.ones(7, 3 * HIDDEN), True)):
        result.learn(SimpleNamespace(logits_output=SimpleNamespace(hidden_states=states)))
        assert result.known == known
    for pictures in (False, True):
        ended = SimpleNamespace(batch_size=2, input_ids=torch.zeros(43), contains_mm_inputs=lambda: pictures)  # noqa: B023
        output: Any = result.of(ended).logits_output
        assert output.next_token_logits.shape == (2, runner.model_config.vocab_size)
        assert output.hidden_states.shape == (43, 3 * HIDDEN)
        assert (output.mm_input_embeds is not None) == pictures
    for algorithm in (SpeculativeAlgorithm.NONE, SpeculativeAlgorithm.STANDALONE):
        runner.spec_algorithm = algorithm
        assert NoResult(runner).known


def test_whole_pass_has_no_pause_and_keeps_graphs() -> None:
    runner, seen = Runner(3), []
    slices.Slices(runner)
    runner.model.register_forward_pre_hook(lambda *_: seen.append(runner.prefill_cuda_graph_runner))
    runner.forward(batch((ROWS, 0)))
    assert (runner.ran, seen) == (["attention", f"mlp {ROWS}"] * 3, ["graphs"])


def test_sliced_pass_uses_graphs_only_in_pauses() -> None:
    runner, seen = Runner(3), []
    runner.model.register_forward_pre_hook(lambda *_: seen.append(runner.prefill_cuda_graph_runner))

    def pause(left: float) -> bool:
        runner.forward(batch((5, 0)))
        return True

    run_in_slices(runner, 1.0, batch((100, 0)), pause)
    assert (seen, runner.prefill_cuda_graph_runner) == ([None, "graphs", "graphs"], "graphs")


def test_metadata_is_rebuilt_only_after_batch_ran_in_pause() -> None:
    runner = Runner(4)
    run_in_slices(runner, 1.0, batch((100, 0)), lambda left: left == 2.0)
    assert [x for x in runner.ran if x.startswith("metadata")] == ["metadata 100"]


def test_sliced_batch_runs_in_pause_of_sliced_batch() -> None:
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


def test_failed_pause_restores_runner() -> None:
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


def test_model_that_bypasses_layers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
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
        """Make a runner whose layers take ``layer_s`` on the device each."""
        runner = Runner(layers, "cuda")
        for layer in runner.model.layers:
            layer.register_forward_hook(lambda *_: self.launch(layer_s, host_s))
        return runner


def test_host_runs_exactly_one_slice_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    ahead: list[float] = []
    pause = make_pause(lambda _: ahead.append(device.free - device.now))
    run_in_slices(device.runner(6, 0.02, host_s=0.001), 1.0, batch((100, 0)), pause)
    assert len(ahead) == 5
    assert ahead == pytest.approx([0.02] * 5)


def test_marks_measure_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches sent at once: the second begins when the first has ended. A result may be there before the mark."""
    device = Device(monkeypatch)
    marks, found = Marks(device.module(), None), []
    for seconds in (0.0, 0.03, 0.05):
        device.launch(seconds)
        found.append(marks.now())
    assert marks.seconds(found[0], found[1]) == pytest.approx(0.03)
    assert marks.seconds(found[1], found[2]) == pytest.approx(0.05)


def test_launch_time_sums_slices_and_pauses_without_device_wait(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_pause_cost_excludes_first_pause_of_pass() -> None:
    runner = Runner(4)
    cutter = slices.Slices(runner)
    assert cutter.pause_s == 0.0
    took = iter((2.0, 0.01, 0.01))

    def pause(_: float) -> bool:
        time.sleep(next(took))
        return False

    with cutter.cut(1, pause):
        runner.forward(batch((100, 0)))
    assert 0.005 < cutter.pause_s < 1.0, "the first of a pass takes in results"


# -- which models


def test_decoder_layers_skip_lists_without_attention() -> None:
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
def test_model_without_decoder_layers_is_refused_with_reason(model: torch.nn.Module, why: str) -> None:
    with pytest.raises(NoLayers, match=why):
        decoder_layers(model)


@pytest.mark.parametrize(("residual", "found"), [("add_norm", 4), ("mhc", 1), ("ihc", 1), ("gated", 1)])
def test_hyper_connections_pause_only_between_layers(residual: str, found: int) -> None:
    """From attention to the end of the MLP coefficients of a pass are kept in the layer."""
    residuals = import_module(f"sglang.srt.layers.layer_boundary.residual.{residual}")
    update = residuals.PLAIN_ADD if residual == "add_norm" else residuals._FfnUpdate(None)
    layer = Runner(2).model.layers[0]
    layer.ffn_boundary = SimpleNamespace(declaration=SimpleNamespace(update=update))
    assert len(points(layer, blocks=False)) == found


@pytest.mark.parametrize(
    ("layer", "backend", "keeps"),
    [
        ({}, {}, None),
        ({"attn_bank": None, "_prefetch_stream": None}, {"low_ratios": ()}, None),
        ({"attn_bank": object()}, {}, "one bank of residuals"),
        ({"_prefetch_stream": object()}, {}, "embeddings fetched for the next layer"),
        ({}, {"low_ratios": (1, 2)}, "what its indexers have found for other layers"),
    ],
)
def test_models_with_shared_pass_state_are_refused(
    layer: dict[str, Any], backend: dict[str, Any], keeps: str | None
) -> None:
    runner = Runner(2)
    vars(runner.model.layers[1]).update(layer)
    vars(runner.attn_backend).update(backend)
    assert no_slices._keeps(runner) == (keeps and f"Model keeps {keeps}")


@pytest.mark.parametrize(("ranks", "refused"), [(1, False), (4, True)])
def test_inkling_is_refused_with_several_tp_ranks(ranks: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_slices, "get_parallel", lambda: SimpleNamespace(tp_size=ranks))
    monkeypatch.setattr(Model, "__module__", "sglang.srt.models.inkling")
    assert (no_slices._keeps(Runner(2)) is not None) is refused


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"external": True}, "--enable-unified-cache-external-linker"),
        ({"flexkv": True}, "--enable-flexkv"),
        ({"experts": "deepep"}, None),
        ({"experts": "mori"}, "--moe-a2a-backend mori"),
        ({"experts": "flashinfer_megamoe"}, "--moe-a2a-backend flashinfer_megamoe"),
        ({"deferred": 2}, "--kt-max-deferred-experts-per-token"),
        ({"device": "npu"}, "NPUs"),
        ({"dump": "/folder"}, "--debug-tensor-dump-output-folder"),
    ],
)
def test_servers_whose_passes_overwrite_each_other_are_refused(
    changed: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"external": False, "flexkv": False, "experts": "none", "deferred": None, "device": "cuda", "dump": None}
    given = {**usual, **changed}
    experts = {"moe_a2a_backend": given["experts"], "kt_max_deferred_experts_per_token": given["deferred"]}
    graphs = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend=None)))
    execution = SimpleNamespace(
        moe=SimpleNamespace(elastic_ep_backend=None, **experts),
        overlap=SimpleNamespace(enable_two_batch_overlap=False),
        graph=graphs,
    )
    parallel = SimpleNamespace(
        attn_dp_size=1, pp_size=1, attn_cp_size=1, enable_kv_cache_sharding=False, attn_tp_size=1
    )
    monkeypatch.setattr(no_slices, "get_exec", lambda: execution)
    monkeypatch.setattr(no_slices, "get_parallel", lambda: parallel)
    monkeypatch.setattr(no_slices, "get_memory", lambda: SimpleNamespace(enable_flexkv=given["flexkv"]))
    runner = SimpleNamespace(canary_manager=None, msprobe_debugger=None)
    scheduler: Any = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        device=given["device"],
        server_args=SimpleNamespace(debug_tensor_dump_output_folder=given["dump"]),
        is_generation=True,
        require_mlp_sync=False,
        enable_unified_memory=False,
        enable_pdmux=False,
        enable_lora_overlap_loading=False,
        enable_unified_cache_external_linker=given["external"],
    )
    why = no_slices._refused(scheduler, together=False)
    assert (why is None) if says is None else (says in str(why))
