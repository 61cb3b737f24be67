"""The full graphs against the stock path, on one model in this process: captured on a GPU, taped elsewhere.

SGLang publishes one server configuration per process, so ``test_graphs.py`` runs this file in its own interpreter.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("LAPS_TEST_GRAPHS_MODEL") != "1", reason="run by test_graphs.py in its own interpreter"
)

CONTEXT = 1024
DTYPE = os.environ.get("LAPS_TEST_DTYPE", "float32")
"""On the CPU; a GPU serves bfloat16."""
VOCABULARY = 512
LENGTHS, SLOTS, MOST = (8, 32, 128), (1, 2, 4, 8, 16), 192


@pytest.fixture(scope="session")
def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory, cuda: bool) -> Any:
    from benchmark.rig import runner as rig

    model = rig.write_shape("tiny", tmp_path_factory.mktemp("model"), context=CONTEXT)
    flags = ["--max-total-tokens", "16384", "--max-running-requests", "64", "--chunked-prefill-size", "2048"]
    device = ["--dtype", "bfloat16", "--attention-backend", "fa3"] if cuda else ["--device", "cpu", "--dtype", DTYPE]
    made = rig.boot(Path(model), *flags, *device, seed=7)
    made.stock_path = made.prefill_cuda_graph_runner
    return made


def config(**knobs: Any) -> Any:
    from laps_core.config import LapsConfig

    given = {"graph_lengths": LENGTHS, "graph_batches": SLOTS, "graph_strategy": "memory"}
    return LapsConfig(**{"graphs": True, **given, **knobs})


@contextmanager
def graphs(runner: Any, **knobs: Any) -> Iterator[Any]:
    """The runner's front, or the reason there is none; the runner as it was afterwards."""
    from sglang_laps.graphs import attach, capture

    # SGLang keeps one such object per attention backend, for one number of request slots.
    kept = ((runner, "prefill_cuda_graph_runner"), (runner, "laps_graphs"))
    kept += ((runner.attn_backend, "full_cg_prefill_metadata"),)
    kept += ((capture, "MOST_ROWS"),)
    held = [getattr(owner, name, None) for owner, name in kept]
    capture.MOST_ROWS = MOST
    runner.prefill_cuda_graph_runner = runner.stock_path
    runner.attn_backend.full_cg_prefill_metadata = None
    try:
        attach(runner, config(**knobs))
        yield runner.laps_graphs
    finally:
        for (owner, name), value in zip(kept, held, strict=True):
            setattr(owner, name, value)


@pytest.fixture(scope="module")
def always(runner: Any) -> Iterator[Any]:
    """Graphs that are replayed whenever they hold a batch."""
    with graphs(runner, graph_strategy="always") as front:
        yield front


def ids(rng: random.Random, count: int) -> list[int]:
    # Token 0 is what padded rows carry; some tests poison it.
    return [rng.randrange(1, VOCABULARY) for _ in range(count)]


def serve(runner: Any, path: Any, news: list[list[int]], olds: list[list[int]] | None = None) -> tuple[Any, list[Any]]:
    """Prefill ``news`` after ``olds`` were cached by the eager path. Returns the turn and the KV of each request."""
    from benchmark.rig import runner as rig

    olds = olds or [[]] * len(news)
    rig.clear(runner)
    held = runner.prefill_cuda_graph_runner
    first = [rig.request(str(i), old or new) for i, (new, old) in enumerate(zip(news, olds, strict=True))]
    try:
        runner.prefill_cuda_graph_runner = runner.eager_runner
        if cached := [r for r, old in zip(first, olds, strict=True) if old]:
            rig.prefill(runner, cached)
        reqs = [rig.continued(r, new) if old else r for r, new, old in zip(first, news, olds, strict=True)]
        runner.prefill_cuda_graph_runner = path
        turn = rig.prefill(runner, reqs)
    finally:
        runner.prefill_cuda_graph_runner = held
    return turn, [rig.kv_of(runner, r) for r in reqs]


def compare(runner: Any, front: Any, news: list[list[int]], olds: list[list[int]] | None, cuda: bool) -> int:
    """Serve by the stock path and by the front, and hold them against each other. Returns the replays."""
    import torch

    want, want_kv = serve(runner, front.stock, news, olds)
    before = front.replayed
    got, got_kv = serve(runner, front, news, olds)
    rough = cuda or DTYPE == "bfloat16"
    # bfloat16 holds logits of 4 to 8 in steps of 1/32: three of them.
    tight = {"rtol": 2e-2, "atol": 3 / 32} if rough else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got.logits, want.logits, **tight)
    for a, b in zip(got_kv, want_kv, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, **tight)
    for mine, theirs, row in zip(got.tokens, want.tokens, want.logits, strict=True):
        top = row.topk(2).values
        if top[0] - top[1] > (0.2 if rough else 1e-3):
            assert mine == theirs
    return int(front.replayed - before)


# -- the same result


@pytest.mark.parametrize("seed", range(6))
def test_random_mixes_equal_the_stock_path(runner: Any, always: Any, cuda: bool, seed: int) -> None:
    rng = random.Random(seed)
    hits = 0
    for _ in range(4):
        count = rng.choice([1, 2, 3, 5, 8, 13, 16])
        news = [ids(rng, rng.randint(1, rng.choice([8, 32, 128]))) for _ in range(count)]
        olds = [ids(rng, rng.randint(1, 300)) if rng.random() < 0.5 else [] for _ in range(count)]
        hits += compare(runner, always, news, olds, cuda)
    assert hits > 0


def test_each_row_count_equals_the_stock_path_when_full_and_when_padded(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(1)
    for rows in always.ladder.rows:
        for tokens in (rows, rows // 2 + 1):
            lens = [tokens // 3, tokens - tokens // 3] if tokens > 128 else [tokens]
            assert compare(runner, always, [ids(rng, n) for n in lens if n], None, cuda) == 1
    assert set(always.status()["hits"]) == {str(n) for n in always.ladder.rows}


def test_nothing_of_an_earlier_batch_is_left(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(3)
    full = [ids(rng, 10) for _ in range(16)]
    assert compare(runner, always, full, [ids(rng, 200) for _ in full], cuda) == 1
    for count in (15, 13):
        assert compare(runner, always, full[:count], None, cuda) == 1


@contextmanager
def poison(runner: Any) -> Iterator[None]:
    """NaN wherever only padded rows look: token 0 and the KV sink."""
    import torch

    table = runner.model.model.embed_tokens.weight
    pool = runner.token_to_kv_pool
    layers = range(runner.model_config.num_hidden_layers)
    sinks = [b[0] for i in layers for b in (pool.get_key_buffer(i), pool.get_value_buffer(i))]
    row = table[0].clone()
    with torch.no_grad():
        for place in (table[0], *sinks):
            place.fill_(torch.nan)
        try:
            yield
        finally:
            table[0] = row
            for sink in sinks:
                sink.zero_()


@pytest.mark.parametrize("seed", range(3))
def test_poisoned_rows_and_slots_change_nothing(runner: Any, always: Any, seed: int) -> None:
    import torch

    rng = random.Random(100 + seed)
    count = rng.choice([3, 9, 15])
    news = [ids(rng, rng.randint(4, 12)) for _ in range(count)]
    if sum(map(len, news)) in always.ladder.rows:
        news[0] = news[0][:-1]  # or nothing would be padded
    olds = [ids(rng, rng.randint(1, 90)) if rng.random() < 0.5 else [] for _ in range(count)]
    before = always.status()
    clean, clean_kv = serve(runner, always, news, olds)
    with poison(runner):
        dirty, dirty_kv = serve(runner, always, news, olds)
    after = always.status()
    assert after["replayed"] == before["replayed"] + 2
    assert after["padded_rows"] > before["padded_rows"]
    assert torch.isfinite(dirty.logits).all()
    assert torch.equal(dirty.logits, clean.logits)
    assert all(torch.equal(x, y) for a, b in zip(dirty_kv, clean_kv, strict=True) for x, y in zip(a, b, strict=True))


def test_a_replay_writes_no_kv_but_its_own_and_the_sink(runner: Any, always: Any) -> None:
    import torch

    from benchmark.rig import runner as rig

    rng = random.Random(5)
    rig.clear(runner)
    held, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, runner.eager_runner
    rig.prefill(runner, [rig.request("bystander", ids(rng, 50))])
    pool = runner.token_to_kv_pool
    before = [pool.get_key_buffer(0).clone(), pool.get_value_buffer(0).clone()]
    reqs = [rig.request(f"r{i}", ids(rng, 7)) for i in range(5)]
    runner.prefill_cuda_graph_runner, hits = always, always.replayed
    rig.prefill(runner, reqs)
    runner.prefill_cuda_graph_runner = held
    assert always.replayed == hits + 1
    table = runner.req_to_token_pool.req_to_token
    own = torch.cat([table[r.kv.req_pool_idx, : r.extend_end] for r in reqs]).long().tolist()
    for old, new in zip(before, (pool.get_key_buffer(0), pool.get_value_buffer(0)), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {*own, 0}


# -- which way a batch goes


def test_what_l_and_b_do_not_admit_goes_the_stock_way(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(6)
    before = always.status()["batches"]
    for lens in ([129], [2] * 17):
        assert compare(runner, always, [ids(rng, n) for n in lens], None, cuda) == 0
    assert always.status()["batches"] == before


def test_what_no_graph_holds_goes_the_stock_way_and_is_counted(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(7)
    before = always.status()["why"].get("no-graph", 0)
    for lens in ([3], [100, 100]):
        assert compare(runner, always, [ids(rng, n) for n in lens], None, cuda) == 0
    assert always.status()["why"]["no-graph"] == before + 2


def test_what_the_runner_refuses_goes_the_stock_way_and_is_counted(runner: Any, always: Any, cuda: bool) -> None:
    if cuda:
        pytest.skip("the tape's attention has a longest sequence, FlashAttention none")
    rng = random.Random(8)
    assert compare(runner, always, [ids(rng, 20)], [ids(rng, 600)], cuda) == 0
    assert always.status()["why"]["unsupported"] == 1


def test_slices_leave_the_graphs_alone(runner: Any, always: Any) -> None:
    import torch
    from sglang_laps.slices import Slices

    from benchmark.rig import runner as rig

    rng = random.Random(9)
    long, short = ids(rng, 100), [ids(rng, 10) for _ in range(3)]
    want, _ = serve(runner, always.stock, [long])
    alone, _ = serve(runner, always.stock, short)
    rig.clear(runner)
    held, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, always
    met: list[Any] = []
    before = always.replayed

    def pause(left: int) -> bool:
        met.append(rig.prefill(runner, [rig.request(f"{left} {i}", x) for i, x in enumerate(short)]))
        return True

    try:
        with torch.no_grad(), Slices(runner).cut(1, pause):
            got = rig.prefill(runner, [rig.request("long", long)])
    finally:
        runner.prefill_cuda_graph_runner = held
        del runner.forward
    assert always.replayed - before == len(met) == runner.model_config.num_hidden_layers - 1
    assert got.tokens == want.tokens
    assert all(m.graph and m.tokens == alone.tokens for m in met)


# -- at start


def test_both_paths_are_timed_and_the_table_decides(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from sglang_laps.graphs import capture

    now, took = [0.0], {}

    def forward(batch: Any) -> Any:
        graph = runner.prefill_cuda_graph_runner is not stock
        rows = next(n for n in (8, 32) if n >= len(batch.input_ids))
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
        monkeypatch.undo()
        rng = random.Random(10)
        for length in (8, 32):
            serve(runner, front, [ids(rng, length)])
        assert front.status()["why"] == {"faster": 1, "slower": 1}
        assert front.status()["hits"] == {"8": 1}


def test_timing_writes_no_kv_but_the_sink(runner: Any) -> None:
    import torch

    from benchmark.rig import runner as rig

    rig.clear(runner)
    pool = runner.token_to_kv_pool
    before = [pool.get_key_buffer(1).clone(), pool.get_value_buffer(1).clone()]
    with graphs(runner, graph_lengths=[8], graph_batches=[1, 2]) as front:
        assert front.ladder.rows == (8, 16)
    for old, new in zip(before, (pool.get_key_buffer(1), pool.get_value_buffer(1)), strict=True):
        assert torch.equal(old[1:], new[1:])
    assert runner.token_to_kv_pool_allocator.available_size() == runner.token_to_kv_pool_allocator.size


def test_it_is_sglangs_own_runner_and_the_settings_are_restored(runner: Any, always: Any) -> None:
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
    from sglang.srt.runtime_context import get_exec

    assert type(always.full) is PrefillCudaGraphRunner
    assert type(always.full.backend) is FullCudaGraphBackend
    assert get_exec().graph.cuda_graph_config.prefill.backend != "full"


def test_the_front_passes_on_what_the_stock_runner_has(always: Any) -> None:
    assert always.device == always.stock.device
    with pytest.raises(AttributeError):
        _ = always.no_such_thing


# -- where it cannot be


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


def test_an_attention_backend_that_was_not_tried(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_laps import graphs as product

    monkeypatch.setitem(product.ATTENTION, runner.device, ("SomeOther",))
    assert f"{type(runner.attn_backend).__name__} is not one of SomeOther" in off(runner, caplog)


def test_a_device_without_graphs(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_laps import graphs as product

    monkeypatch.delitem(product.ATTENTION, runner.device)
    assert off(runner, caplog) == f"device {runner.device} has no graph capture"


def test_a_user_who_chose_full_graphs_has_them(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.runtime_context import get_exec

    monkeypatch.setattr(get_exec().graph.cuda_graph_config.prefill, "backend", "full")
    assert "backend 'full'" in off(runner, caplog)


def test_flags_that_leave_no_row_count(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert "no row count" in off(runner, caplog, graph_lengths=[1 << 20])


def test_a_failed_capture_leaves_the_server_as_it_was(
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
    assert off(runner, caplog) == "OutOfMemoryError: no memory left"
    serve(runner, runner.stock_path, [ids(random.Random(9), 9)])


def test_sglangs_warning_is_passed_on(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), graphs(runner, graph_lengths=[8], graph_batches=[1], graph_strategy="always"):
        assert sum("experimental" in r.getMessage() for r in caplog.records) == 1


def test_every_hooked_name_exists(runner: Any) -> None:
    import pkgutil

    from sglang_laps.graphs import CAPTURED

    assert callable(pkgutil.resolve_name(CAPTURED))
