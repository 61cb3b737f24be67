"""The full graphs give what SGLang's own path gives, and write nowhere else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .models import graphs, poison_padding, prefill, random_ids, require_equal_results, serve


@pytest.mark.parametrize("seed", range(3))
def test_random_mixes_equal_stock_path(runner: Any, always: Any, cuda: bool, seed: int) -> None:
    rng = random.Random(seed)
    hits = 0
    for _ in range(4):
        count = rng.choice([1, 2, 3, 5, 8, 13, 16])
        news = [random_ids(rng, rng.randint(1, rng.choice([8, 32, 128]))) for _ in range(count)]
        olds = [random_ids(rng, rng.randint(1, 300)) if rng.random() < 0.5 else [] for _ in range(count)]
        hits += require_equal_results(runner, always, news, olds, cuda)
    assert hits > 0


def test_each_row_count_equals_stock_path_full_and_padded(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(1)
    for rows in always.ladder.rows:
        for tokens in (rows, rows // 2 + 1):
            lens = [tokens // 3, tokens - tokens // 3] if tokens > 128 else [tokens]
            assert require_equal_results(runner, always, [random_ids(rng, n) for n in lens if n], None, cuda) == 1
    assert set(always.status()["hits"]) == {str(n) for n in always.ladder.rows}


def test_earlier_batch_does_not_affect_replay(runner: Any, always: Any, cuda: bool) -> None:
    rng = random.Random(3)
    full = [random_ids(rng, 10) for _ in range(16)]
    assert require_equal_results(runner, always, full, [random_ids(rng, 200) for _ in full], cuda) == 1
    for count in (15, 13):
        assert require_equal_results(runner, always, full[:count], None, cuda) == 1


@pytest.mark.parametrize("seed", range(3))
def test_poisoned_rows_and_slots_change_nothing(runner: Any, always: Any, seed: int) -> None:
    import torch

    rng = random.Random(100 + seed)
    count = rng.choice([3, 9, 15])
    news = [random_ids(rng, rng.randint(4, 12)) for _ in range(count)]
    if sum(map(len, news)) in always.ladder.rows:
        news[0] = news[0][:-1]  # or nothing would be padded
    olds = [random_ids(rng, rng.randint(1, 90)) if rng.random() < 0.5 else [] for _ in range(count)]
    before = always.status()
    clean, clean_kv = serve(runner, always, news, olds)
    with poison_padding(runner):
        dirty, dirty_kv = serve(runner, always, news, olds)
    after = always.status()
    assert after["replayed"] == before["replayed"] + 2
    assert after["padded_rows"] > before["padded_rows"]
    assert torch.isfinite(dirty.logits).all()
    assert torch.equal(dirty.logits, clean.logits)
    assert all(torch.equal(x, y) for a, b in zip(dirty_kv, clean_kv, strict=True) for x, y in zip(a, b, strict=True))


def test_replay_writes_kv_only_to_own_slots_and_sink(runner: Any, always: Any) -> None:
    import torch

    from benchmark.rig import runner as rig

    rng = random.Random(5)
    rig.clear(runner)
    held, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, runner.eager_runner
    prefill(runner, [rig.request("bystander", random_ids(rng, 50))])
    pool = runner.token_to_kv_pool
    before = [pool.get_key_buffer(0).clone(), pool.get_value_buffer(0).clone()]
    reqs = [rig.request(f"r{i}", random_ids(rng, 7)) for i in range(5)]
    runner.prefill_cuda_graph_runner, hits = always, always.replayed
    prefill(runner, reqs)
    runner.prefill_cuda_graph_runner = held
    assert always.replayed == hits + 1
    table = runner.req_to_token_pool.req_to_token
    own = torch.cat([table[r.kv.req_pool_idx, : r.extend_end] for r in reqs]).long().tolist()
    for old, new in zip(before, (pool.get_key_buffer(0), pool.get_value_buffer(0)), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {*own, 0}


def test_timing_writes_kv_only_to_sink(runner: Any) -> None:
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
