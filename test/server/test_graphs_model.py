"""The cells against the stock path, on one model in this process: real capture on a GPU, emulated elsewhere.

SGLang publishes one server configuration per process, so ``test_graphs.py`` runs this file in its own interpreter.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("LAPS_TEST_GRAPHS_MODEL") != "1", reason="run by test_graphs.py in its own interpreter"
)

CONTEXT = 4096
DTYPE = os.environ.get("LAPS_TEST_DTYPE", "float32")
"""On the CPU; a GPU serves bfloat16."""
VOCABULARY = 512
LENGTHS, SLOTS = (8, 32, 128), (1, 4, 16, 64)


@pytest.fixture(scope="session")
def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory, cuda: bool) -> Any:
    from sglang_laps.graphs import rig

    if not cuda:
        from sglang.srt.platforms import current_platform
        from sglang_laps.graphs.backend import EmulatedGraphBackend

        type(current_platform).get_full_graph_backend_cls = lambda self: EmulatedGraphBackend  # type: ignore[method-assign]
    model = rig.write_shape("tiny", tmp_path_factory.mktemp("model"), context=CONTEXT)
    flags = ["--max-total-tokens", "65536", "--max-running-requests", "128", "--chunked-prefill-size", "2048"]
    device = ["--dtype", "bfloat16"] if cuda else ["--device", "cpu", "--dtype", DTYPE]
    return rig.boot(Path(model), *flags, *device, seed=7)


def config(**knobs: Any) -> Any:
    from laps_core.config import LapsConfig

    given = {"graph_lengths": LENGTHS, "graph_batches": SLOTS, "graph_budget": 24, **knobs}
    return LapsConfig(graphs=True, **given)


@contextmanager
def cells(runner: Any, **knobs: Any) -> Iterator[Any]:
    """The runner with cells; its own path again afterwards."""
    from sglang_laps.graphs import attach

    stock = runner.prefill_cuda_graph_runner
    try:
        yield attach(runner, config(**knobs))
    finally:
        runner.prefill_cuda_graph_runner = stock


@pytest.fixture(scope="session")
def always(runner: Any) -> Any:
    """A front that replays whenever a cell covers; not in place between tests."""
    with cells(runner, graph_always=True) as front:
        return front


@contextmanager
def through(runner: Any, front: Any) -> Iterator[None]:
    held, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, front
    try:
        yield
    finally:
        runner.prefill_cuda_graph_runner = held


def ids(rng: random.Random, count: int) -> list[int]:
    # Token 0 is what neutral rows carry; some tests poison it.
    return [rng.randrange(1, VOCABULARY) for _ in range(count)]


def serve(runner: Any, front: Any, news: list[list[int]], olds: list[list[int]] | None = None) -> tuple[Any, list[Any]]:
    """Prefill ``news`` after ``olds`` were cached by the stock path. Returns the turn and the KV of each request."""
    from sglang_laps.graphs import rig, timed_forward

    rig.clear(runner)
    first = [
        rig.request(str(i), old or new) for i, (new, old) in enumerate(zip(news, olds or [[]] * len(news), strict=True))
    ]
    cached = [r for r, old in zip(first, olds or [[]] * len(news), strict=True) if old]
    if cached:
        with through(runner, stock_of(front)):
            rig.prefill(runner, cached)
    reqs = [
        rig.continued(r, new) if old else r for r, new, old in zip(first, news, olds or [[]] * len(news), strict=True)
    ]
    forward = type(runner).forward
    runner.forward = lambda batch, **kw: timed_forward(forward, runner, batch, **kw)
    try:
        with through(runner, front):
            turn = rig.prefill(runner, reqs)
    finally:
        del runner.forward
    return turn, [rig.kv_of(runner, r) for r in reqs]


def stock_of(front: Any) -> Any:
    return getattr(front, "stock", front)


def compare(runner: Any, front: Any, news: list[list[int]], olds: list[list[int]] | None, cuda: bool) -> Any:
    """Serve twice, stock and cells, and hold them against each other."""
    import torch

    want, want_kv = serve(runner, front.stock, news, olds)
    got, got_kv = serve(runner, front, news, olds)
    rough = cuda or DTYPE == "bfloat16"
    tight = {"rtol": 2e-2, "atol": 6e-2} if rough else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got.logits, want.logits, **tight)
    for a, b in zip(got_kv, want_kv, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, **tight)
    for mine, theirs, row in zip(got.tokens, want.tokens, want.logits, strict=True):
        top = row.topk(2).values
        if top[0] - top[1] > (0.2 if rough else 1e-3):
            assert mine == theirs
    return got


def replayed(front: Any, action: Callable[[], Any]) -> tuple[int, Any]:
    before = front.demand.hits
    result = action()
    return front.demand.hits - before, result


# -- the same result


@pytest.mark.parametrize("seed", range(8))
def test_random_mixes_equal_the_stock_path(runner: Any, always: Any, cuda: bool, seed: int) -> None:
    rng = random.Random(seed)
    hits = 0
    for _ in range(4):
        count = rng.choice([1, 2, 3, 5, 8, 13, 21, 34, 64])
        news = [ids(rng, rng.randint(1, rng.choice([8, 32, 128]))) for _ in range(count)]
        olds = [ids(rng, rng.randint(1, 300)) if rng.random() < 0.5 else [] for _ in range(count)]
        more, _ = replayed(always, lambda n=news, o=olds: compare(runner, always, n, o, cuda))  # type: ignore[misc]
        hits += more
    assert hits > 0


@pytest.mark.parametrize(("length", "slots"), [(8, 1), (32, 4), (128, 16)])
def test_a_batch_of_exactly_the_cells_shape_is_bit_equal(runner: Any, cuda: bool, length: int, slots: int) -> None:
    import torch
    from sglang_laps.graphs.runner import full_batch

    rng = random.Random(length)
    with cells(runner, graph_always=True, graph_lengths=[length], graph_batches=[slots]) as front:
        exact = full_batch(max(front.cells.cells))
        assert exact.tokens == max(front.cells.cells).tokens
        news = [ids(rng, new) for new, _ in exact.requests]
        want, want_kv = serve(runner, front.stock, news)
        hits, (got, got_kv) = replayed(front, lambda: serve(runner, front, news))
        assert hits == 1
        assert got.graph
        if cuda:
            torch.testing.assert_close(got.logits, want.logits, rtol=2e-2, atol=6e-2)
        else:
            assert torch.equal(got.logits, want.logits)
            assert all(
                torch.equal(x, y) for a, b in zip(got_kv, want_kv, strict=True) for x, y in zip(a, b, strict=True)
            )


def test_nothing_of_an_earlier_batch_is_left_in_a_cell(runner: Any, cuda: bool) -> None:
    rng = random.Random(3)
    with cells(runner, graph_always=True, graph_lengths=[16], graph_batches=[16], graph_pad_max=0.5) as front:
        full = [ids(rng, 14) for _ in range(16)]
        compare(runner, front, full, [ids(rng, 200) for _ in range(16)], cuda)
        for count in (15, 9):
            compare(runner, front, full[:count], None, cuda)
        assert front.demand.hits == 3


# -- neutral rows and slots


@contextmanager
def poison(runner: Any, front: Any) -> Iterator[None]:
    """NaN wherever only neutral rows look: token 0, the KV sink, the last replay's outputs."""
    import torch

    table = runner.model.model.embed_tokens.weight
    sinks = [
        b[0]
        for layer in range(runner.model_config.num_hidden_layers)
        for b in (runner.token_to_kv_pool.get_key_buffer(layer), runner.token_to_kv_pool.get_value_buffer(layer))
    ]
    row = table[0].clone()
    with torch.no_grad():
        table[0] = torch.nan
        for sink in sinks:
            sink.fill_(torch.nan)
        out = getattr(front.cells.backend, "_out", None)
        if out is not None:
            out.fill_(torch.nan)
        try:
            yield
        finally:
            table[0] = row
            for sink in sinks:
                sink.zero_()


@pytest.mark.parametrize("seed", range(4))
def test_poisoned_tails_and_slots_change_nothing(runner: Any, always: Any, cuda: bool, seed: int) -> None:
    import torch

    rng = random.Random(100 + seed)
    count = rng.choice([3, 9, 17])
    news = [ids(rng, rng.randint(1, 30)) for _ in range(count)]
    olds = [ids(rng, rng.randint(1, 90)) if rng.random() < 0.5 else [] for _ in range(count)]
    clean, clean_kv = serve(runner, always, news, olds)
    with poison(runner, always):
        hits, (dirty, dirty_kv) = replayed(always, lambda: serve(runner, always, news, olds))
    assert hits == 1
    assert always.padded > 0
    assert torch.isfinite(dirty.logits).all()
    assert torch.equal(dirty.logits, clean.logits)
    assert all(torch.equal(x, y) for a, b in zip(dirty_kv, clean_kv, strict=True) for x, y in zip(a, b, strict=True))


def test_a_replay_writes_no_kv_but_its_own_and_the_sink(runner: Any, always: Any) -> None:
    import torch
    from sglang_laps.graphs import rig

    rng = random.Random(5)
    rig.clear(runner)
    bystander = rig.request("bystander", ids(rng, 50))
    with through(runner, always.stock):
        rig.prefill(runner, [bystander])
    pool = runner.token_to_kv_pool
    before = [pool.get_key_buffer(0).clone(), pool.get_value_buffer(0).clone()]
    reqs = [rig.request(f"r{i}", ids(rng, 7)) for i in range(5)]
    with through(runner, always):
        hits, _ = replayed(always, lambda: rig.prefill(runner, reqs))
    assert hits == 1
    table = runner.req_to_token_pool.req_to_token
    own = torch.cat([table[r.kv.req_pool_idx, : r.extend_end] for r in reqs]).long().tolist()
    for old, new in zip(before, (pool.get_key_buffer(0), pool.get_value_buffer(0)), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {*own, 0}


# -- what cells do not serve


def test_every_hooked_name_exists(runner: Any) -> None:
    import pkgutil

    from sglang_laps.graphs import HOOKS

    assert all(callable(pkgutil.resolve_name(name)) for name, _ in HOOKS)


def test_what_no_cell_covers_goes_the_stock_way(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(6)
    for news in ([ids(rng, 129)], [ids(rng, 3) for _ in range(65)], [ids(rng, 2)]):
        hits, got = replayed(always, lambda n=news: compare(runner, always, n, None, cuda))  # type: ignore[misc]
        assert hits == 0
        assert cuda or not got.graph


def test_the_front_passes_on_what_the_stock_runner_has(runner: Any, always: Any) -> None:
    assert always.device == always.stock.device
    with pytest.raises(AttributeError):
        _ = always.no_such_thing


# -- the choice


def test_only_what_measures_faster_is_replayed(runner: Any) -> None:
    rng = random.Random(8)
    news = [ids(rng, 8) for _ in range(4)]
    with cells(runner, graph_lengths=[8], graph_batches=[4]) as front:
        assert front.status()["replayed"] == 0
        for _ in range(4):
            serve(runner, front, news)
        assert front.why["no-estimate"] == 2
        front.gains._stock.clear()
        batch = front.demand._seen[0][0]
        for _ in range(20):
            front.gains.saw_stock(batch, 1e3)
        hits, _ = replayed(front, lambda: serve(runner, front, news))
        assert hits == 1
        for _ in range(300):
            front.gains.saw_stock(batch, 1e-9)
        hits, _ = replayed(front, lambda: serve(runner, front, news))
        assert hits == 0
        assert front.why["slower"] + front.why["no-estimate"] >= 1


# -- capture


def test_capture_stays_within_its_budget(runner: Any) -> None:
    with cells(runner, graph_always=True, graph_budget=3) as front:
        assert len(front.cells.cells) == 3
        assert front.status()["capture_s"] > 0
    with cells(runner, graph_always=True, graph_budget_s=0.0) as front:
        assert len(front.cells.cells) <= 1


def test_a_failed_capture_leaves_the_server_as_it_was(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cuda: bool
) -> None:
    import torch
    from sglang_laps import graphs
    from sglang_laps.graphs.runner import CellGraphRunner

    sound = CellGraphRunner._capture_cell

    def fails(self: Any, cell: Any) -> None:
        if len(self.seconds) == 2:
            raise torch.OutOfMemoryError("no memory left\nfor this")
        sound(self, cell)

    monkeypatch.setattr(CellGraphRunner, "_capture_cell", fails)
    stock = runner.prefill_cuda_graph_runner
    with caplog.at_level("WARNING"), cells(runner, graph_always=True) as front:
        assert front is None
        assert runner.prefill_cuda_graph_runner is stock
        assert graphs.status(runner)["on"] is False
    lines = [r.getMessage() for r in caplog.records if r.name == "sglang_laps.graphs"]
    assert len(lines) == 1
    assert "off" in lines[0]
    assert "no memory left" in lines[0]
    rng = random.Random(9)
    serve(runner, runner.prefill_cuda_graph_runner, [ids(rng, 9)])


def test_an_attention_backend_without_a_seam_is_refused(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_laps import graphs
    from sglang_laps.graphs import attention

    monkeypatch.setattr(attention, "SEAMS", {})
    monkeypatch.setattr(attention, "EMULATED_SEAMS", {})
    with cells(runner) as front:
        assert front is None
        assert "attention backend" in graphs.status(runner)["why"]


def test_the_servers_graph_settings_are_restored(runner: Any) -> None:
    from sglang.srt.runtime_context import get_exec

    before = get_exec().graph.cuda_graph_config.prefill
    with cells(runner, graph_always=True, graph_budget=1):
        assert get_exec().graph.cuda_graph_config.prefill is before


# -- replacement


def test_cells_are_replaced_between_batches_and_nothing_is_lost(runner: Any, cuda: bool) -> None:
    rng = random.Random(10)
    with cells(runner, graph_always=True, graph_budget=6, graph_window=12, graph_swaps=2) as front:
        count = len(front.cells.cells)
        for _ in range(6):
            for _ in range(12):
                news = [ids(rng, rng.randint(20, 32)) for _ in range(rng.randint(3, 4))]
                olds = [ids(rng, 40) if rng.random() < 0.5 else [] for _ in news]
                compare(runner, front, news, olds, cuda)
            front.idle()
            assert set(front.buckets.cells) == set(front.cells.cells)
            assert len(front.cells.cells) == count
        assert 0 < front.replaced <= 12
        assert front.status()["hit_rate"] > 0


def test_a_late_capture_touches_no_cached_kv(runner: Any) -> None:
    import torch

    rng = random.Random(11)
    with cells(runner, graph_always=True, graph_budget=6) as front:
        hits, _ = replayed(front, lambda: serve(runner, front, [ids(rng, 20) for _ in range(4)]))
        assert hits == 1
        pool = runner.token_to_kv_pool
        before = [pool.get_key_buffer(1).clone(), pool.get_value_buffer(1).clone()]
        dead, wanted = (
            front.cells.cells[-1],
            next(c for c in front.cells.plan.candidates if c not in front.cells.seconds),
        )
        front.cells.discard(dead)
        front.cells.capture_more(wanted)
        front.cells.rehearse(wanted)
        assert wanted in front.cells.seconds
        assert dead not in front.cells.seconds
        for old, new in zip(before, (pool.get_key_buffer(1), pool.get_value_buffer(1)), strict=True):
            assert torch.equal(old[1:], new[1:])


# -- SGLang's own full-graph backend, with graphs that run their body again


@pytest.fixture
def own_backend(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> type:
    """FullCudaGraphBackend as it is, on a device whose graphs are stood in for."""
    if cuda:
        pytest.skip("the real one is used here")
    from contextlib import nullcontext
    from types import SimpleNamespace

    import torch
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.runner_backend import full_cuda_graph_backend
    from sglang_laps.graphs import front

    class Graph:
        freed = 0

        def replay(self) -> None:
            self.body()

        def reset(self) -> None:
            type(self).freed += 1

    class Backend(full_cuda_graph_backend.FullCudaGraphBackend):
        graph = Graph

        def __init__(self, runner: Any) -> None:
            super().__init__(runner, reuse_output_buffer=True)
            self._device_module = SimpleNamespace(
                graph=lambda **_: nullcontext(), synchronize=lambda: None, graph_pool_handle=lambda: (0, 1)
            )

        def capture_one(self, key: Any, body: Any, **kwargs: Any) -> None:
            super().capture_one(key, body, **kwargs)
            out = self._outputs[key]
            self._graphs[key].body = lambda: out.copy_(body())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(front, "emulation", lambda: Backend)
    with envs.SGLANG_ENABLE_GRAPH_POOL_PRECARVE.override(False):
        yield Backend


def test_all_cells_share_the_backends_output_buffer(runner: Any, own_backend: Any, cuda: bool) -> None:
    rng = random.Random(13)
    with cells(runner, graph_always=True, graph_budget=10, graph_window=8, graph_swaps=1) as front:
        backend = front.cells.backend
        assert type(backend) is own_backend
        shared = backend._output_buffer
        assert shared.shape[0] == max(c.tokens for c in front.cells.cells)
        for _ in range(8):
            news = [ids(rng, rng.randint(9, 30)) for _ in range(4)]
            compare(runner, front, news, [ids(rng, 20) for _ in news], cuda)
        assert front.demand.hits > 0
        front.idle()
        assert front.replaced == 1
        assert own_backend.graph.freed == 1
        assert len(backend._graphs) == len(front.cells.cells) == 10
        assert backend._output_buffer is shared
        assert {o.data_ptr() for o in backend._outputs.values()} == {shared.data_ptr()}
        compare(runner, front, [ids(rng, 20) for _ in range(4)], None, cuda)


# -- FlashAttention's metadata, with SGLang's own code and attention computed from nothing else


@pytest.fixture
def paged(runner: Any, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An attention backend that computes from capture-stable metadata alone, as FlashAttention's kernels do."""
    if cuda:
        pytest.skip("the real one is used here")
    import sys
    from unittest.mock import MagicMock

    import torch

    # Kernels that need a driver; the metadata code does not.
    monkeypatch.setitem(sys.modules, "sgl_kernel", MagicMock())
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.flash_attention", MagicMock())
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend as Real
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang_laps.graphs import attention

    class FlashAttentionBackend(TorchNativeAttnBackend):
        _init_full_cg_prefill_metadata = Real._init_full_cg_prefill_metadata

        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            self.kv_index_translator = model_runner.kv_index_translator
            self.req_to_token = model_runner.req_to_token_pool.req_to_token
            self.max_context_len = self.max_num_pages = CONTEXT
            self.page_size = 1
            self.full_cg_prefill_metadata: Any = "the stock runner's"

        def init_forward_metadata(self, forward_batch: Any) -> None:
            self.forward_metadata = None

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            self._init_full_cg_prefill_metadata(forward_batch, in_capture)

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Any:
            m = self.forward_metadata
            if m is None:
                return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
            keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            out = torch.full_like(rows, torch.nan)
            for i, length in enumerate(m.cache_seqlens_int32.tolist()):
                first, last = m.cu_seqlens_q[i : i + 2].tolist()
                if last == first:
                    assert length == 0
                    continue
                slots = m.page_table[i, :length].long()
                at = torch.arange(length - (last - first), length)
                out[first:last] = torch.nn.functional.scaled_dot_product_attention(
                    rows[first:last].movedim(0, 1)[None],
                    keys[slots].movedim(0, 1)[None],
                    values[slots].movedim(0, 1)[None],
                    attn_mask=torch.arange(length)[None] <= at[:, None],
                    scale=layer.scaling,
                    enable_gqa=True,
                )[0].movedim(0, 1)
            return out.view(q.shape)

    monkeypatch.setattr(
        attention, "EMULATED_SEAMS", {"FlashAttentionBackend": attention.FlashAttentionSeam}, raising=True
    )
    backend = FlashAttentionBackend(runner)
    monkeypatch.setattr(runner, "attn_backend", backend)
    return backend


def test_each_cell_has_metadata_of_its_slots_and_its_length(
    runner: Any, paged: Any, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_laps.graphs.backend import EmulatedGraphBackend

    launched = {}
    sound = EmulatedGraphBackend.capture_one

    def capture_one(self: Any, key: Any, *args: Any, **kwargs: Any) -> None:
        m = paged.forward_metadata
        launched[key] = (m.max_seq_len_q, m.cache_seqlens_int32.shape[0], m.page_table.data_ptr())
        sound(self, key, *args, **kwargs)

    monkeypatch.setattr(EmulatedGraphBackend, "capture_one", capture_one)
    rng = random.Random(12)
    with cells(runner, graph_always=True) as front:
        for key, (length, slots, _) in launched.items():
            assert key.attention_variant == f"laps:{length}x{slots}"
        assert len({where for *_, where in launched.values()}) == 1
        assert len({slots for _, slots, _ in launched.values()}) > 1
        for _ in range(10):
            count = rng.choice([1, 3, 4, 9, 16, 40])
            news = [ids(rng, rng.randint(1, rng.choice([8, 32, 128]))) for _ in range(count)]
            olds = [ids(rng, rng.randint(1, 200)) if rng.random() < 0.5 else [] for _ in range(count)]
            compare(runner, front, news, olds, cuda)
        assert front.demand.hits > 3
        assert paged.full_cg_prefill_metadata == "the stock runner's"
