"""Graph cells: the plan, agreement between ranks, and the model suite in an interpreter of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from laps_core.buckets import Batch, Buckets
from laps_core.config import LapsConfig
from sglang_laps.graphs.plan import Limits, make_plan

HERE = Path(__file__).parent
LIMITS = Limits(tokens=8192, length=32768, slots=4096, granule=1)


def test_the_default_plan_is_within_its_budget() -> None:
    plan = make_plan(LapsConfig(), LIMITS)
    assert plan is not None
    assert 16 <= len(plan.cells) <= 64
    assert plan.cells[0] == max(plan.cells)
    assert set(plan.cells) <= set(plan.candidates)
    assert all(c.tokens <= 2048 for c in plan.candidates)
    assert all(c.covers(Batch.of([1])) for c in plan.cells)


def test_a_plan_keeps_to_the_servers_limits() -> None:
    plan = make_plan(LapsConfig(graph_max_length=100), Limits(tokens=300, length=4096, slots=10, granule=6))
    assert plan is not None
    assert plan.granule == 24
    assert all(c.length <= 64 and c.batch <= 8 and c.tokens <= 312 and c.tokens % 24 == 0 for c in plan.candidates)
    assert make_plan(LapsConfig(), Limits(tokens=64, length=4, slots=4, granule=1)) is None


def test_a_small_grid_is_captured_whole() -> None:
    plan = make_plan(LapsConfig(graph_lengths=[16], graph_batches=[16]), LIMITS)
    assert plan is not None
    assert set(plan.cells) == set(plan.candidates)
    assert plan.cells[0].tokens == 256


def test_where_attention_knows_no_l_and_b_cells_differ_by_rows_alone() -> None:
    plan = make_plan(LapsConfig(), Limits(tokens=8192, length=32768, slots=4096, granule=1, shaped=False))
    assert plan is not None
    assert {(c.length, c.batch) for c in plan.candidates} == {(256, 64)}
    assert Buckets(plan.candidates, pad_max=0.25).nearest(Batch.of([3, 4])) is not None


RANKS = """
import sys
import torch.distributed as dist
from types import SimpleNamespace
from sglang_laps.graphs.ranks import Ranks

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
ranks = Ranks(SimpleNamespace(world_size=2, rank_in_group=rank, ranks=[0, 1], cpu_group=dist.group.WORLD))
assert ranks.first == (rank == 0)
assert [ranks.agree(v + 10 * rank) for v in (-1, 3)] == [-1, 3]
assert (ranks.all(True), ranks.all(rank == 0)) == (True, False)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_follow_the_first() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    both = [subprocess.Popen([sys.executable, "-c", RANKS, str(rank), where]) for rank in (0, 1)]
    assert [p.wait(timeout=120) for p in both] == [0, 0]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("dtype", "only"), [("float32", ""), ("bfloat16", "random_mixes or bit_equal or poisoned")])
def test_the_model_suite(dtype: str, only: str) -> None:
    suite = str(HERE / "test_graphs_model.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", "-k", only, suite],
        env={"OMP_NUM_THREADS": "1", **os.environ, "LAPS_TEST_GRAPHS_MODEL": "1", "LAPS_TEST_DTYPE": dtype},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-12000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
