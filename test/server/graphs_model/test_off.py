"""Models without graphs: the server runs as stock, and says why."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .models import graphs, random_ids, serve


def off(runner: Any, caplog: pytest.LogCaptureFixture, **knobs: Any) -> str:
    """Why the graphs are off: in the status, and in one line of the log."""
    from sglang_laps import graphs as product

    with caplog.at_level("WARNING"), graphs(runner, **knobs) as reason:
        assert runner.prefill_cuda_graph_runner is runner.stock_path
        assert product.status(runner) == {"on": False, "why": reason}
        assert product.replays(runner) == 0
    lines = [r.getMessage() for r in caplog.records if r.name == "sglang_laps.graphs"]
    assert lines == [f"LAPS prefill graphs are off: {reason}."]
    return str(reason)


def test_graphs_are_off_for_unsupported_attention_backend(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_laps import graphs as product

    monkeypatch.setitem(product.ATTENTION, runner.device, ("SomeOther",))
    assert f"{type(runner.attn_backend).__name__} is not one of SomeOther" in off(runner, caplog)


def test_graphs_are_off_for_device_without_capture(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_laps import graphs as product

    monkeypatch.delitem(product.ATTENTION, runner.device)
    assert off(runner, caplog) == f"device {runner.device} has no graph capture"


def test_graphs_are_off_if_user_selects_full_backend(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.runtime_context import get_exec

    monkeypatch.setattr(get_exec().graph.cuda_graph_config.prefill, "backend", "full")
    assert "backend 'full'" in off(runner, caplog)


def test_graphs_are_off_if_flags_leave_no_row_count(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert "no row count" in off(runner, caplog, graph_lengths=[1 << 20])


def test_failed_capture_restores_stock_path(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

    sound, done = FullCudaGraphBackend.capture_one, []

    def fails(self: Any, *args: Any, **kwargs: Any) -> None:
        done.append(args)
        if len(done) == 2:
            raise torch.OutOfMemoryError("no memory left\nfor this")
        sound(self, *args, **kwargs)

    monkeypatch.setattr(FullCudaGraphBackend, "capture_one", fails)
    assert off(runner, caplog, graph_lengths=[8, 16], graph_batches=[1]) == "OutOfMemoryError: no memory left"
    serve(runner, runner.stock_path, [random_ids(random.Random(9), 9)])
