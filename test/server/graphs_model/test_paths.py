"""Which way a batch goes, and what decides it at start."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .models import graphs, prefill, random_ids, require_equal_results, serve


def test_batch_beyond_length_or_size_limit_uses_stock_path(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(6)
    before = always.status()["batches"]
    for lens in ([129], [2] * 17):
        assert require_equal_results(runner, always, [random_ids(rng, n) for n in lens], None, cuda) == 0
    assert always.status()["batches"] == before


def test_batch_without_graph_uses_stock_path_and_is_counted(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(7)
    before = always.status()["why"].get("no-graph", 0)
    for lens in ([3], [100, 100]):
        assert require_equal_results(runner, always, [random_ids(rng, n) for n in lens], None, cuda) == 0
    assert always.status()["why"]["no-graph"] == before + 2


def test_refused_batch_uses_stock_path_and_is_counted(runner: Any, always: Any, cuda: bool) -> None:
    if cuda:
        pytest.skip("the tape's attention has a longest sequence, FlashAttention none")
    rng = random.Random(8)
    assert require_equal_results(runner, always, [random_ids(rng, 20)], [random_ids(rng, 600)], cuda) == 0
    assert always.status()["why"]["unsupported"] == 1


def test_short_batches_replay_graphs_in_pauses_of_sliced_pass(runner: Any, always: Any) -> None:
    import torch
    from sglang_laps.passes.slices import Slices

    from benchmark.rig import runner as rig

    rng = random.Random(9)
    long, short = random_ids(rng, 100), [random_ids(rng, 10) for _ in range(3)]
    want, _ = serve(runner, always.stock, [long])
    alone, _ = serve(runner, always.stock, short)
    rig.clear(runner)
    held, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, always
    met: list[Any] = []
    before = always.replayed

    def pause(left: float) -> bool:
        met.append(prefill(runner, [rig.request(f"{left} {i}", x) for i, x in enumerate(short)]))
        return True

    try:
        with torch.no_grad(), Slices(runner).cut(1, pause):
            got = prefill(runner, [rig.request("long", long)])
    finally:
        runner.prefill_cuda_graph_runner = held
        del runner.forward
    assert always.replayed - before == len(met) == runner.model_config.num_hidden_layers - 1
    assert got.tokens == want.tokens
    assert all(m.graph and m.tokens == alone.tokens for m in met)


def test_timing_selects_faster_path_by_number_of_rows(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from sglang_laps.graphs import capture

    now = [0.0]
    took: dict[tuple[bool, int], list[Any]] = {}
    tokens: dict[int, set[tuple[int, ...]]] = {}

    def forward(batch: Any) -> Any:
        graph = runner.prefill_cuda_graph_runner is not stock
        rows = next(n for n in (8, 32) if n >= len(batch.input_ids))
        tokens.setdefault(rows, set()).add(tuple(batch.input_ids.tolist()))
        took.setdefault((graph, rows), []).append(sound(batch))
        now[0] += {(False, 8): 2.0, (True, 8): 1.0, (False, 32): 1.0, (True, 32): 1.5}[graph, rows]
        return took[graph, rows][-1]

    stock, sound = runner.stock_path, runner.forward
    monkeypatch.setattr(runner, "forward", forward, raising=False)
    monkeypatch.setattr(capture, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with graphs(runner, graph_lengths=[8, 32], graph_batches=[1]) as front:
        assert front.status()["row_counts"] == [8, 32]
        assert front.status()["faster"] == [8]
        assert {len(outputs) for outputs in took.values()} == {capture.REPEATS}
        assert all(output.can_run_graph for (graph, _), outputs in took.items() for output in outputs if graph)
        for rows, (same,) in tokens.items():
            assert len(set(same)) > rows / 2, "a mixture of experts reads as many experts as it will"
        monkeypatch.undo()
        rng = random.Random(10)
        for length in (8, 32):
            serve(runner, front, [random_ids(rng, length)])
        assert front.status()["why"] == {"faster": 1, "slower": 1}
        assert front.status()["hits"] == {"8": 1}


def test_graphs_use_sglang_runner_and_restore_settings(runner: Any, always: Any) -> None:
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
    from sglang.srt.runtime_context import get_exec

    assert type(always.full) is PrefillCudaGraphRunner
    assert type(always.full.backend) is FullCudaGraphBackend
    assert get_exec().graph.cuda_graph_config.prefill.backend != "full"


def test_front_forwards_attributes_of_stock_runner(always: Any) -> None:
    assert always.device == always.stock.device
    with pytest.raises(AttributeError):
        _ = always.no_such_thing


def test_sglang_experimental_warning_is_logged_once(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), graphs(runner, graph_lengths=[8], graph_batches=[1], graph_strategy="always"):
        assert sum("experimental" in r.getMessage() for r in caplog.records) == 1
