"""The model suite of prefill graphs and of passes in slices, in a new interpreter, with a tape in place of CUDA
graphs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import warm

HERE = Path(__file__).parent


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("dtype", "only"), [("float32", ""), ("bfloat16", "random_mixes or row_count or poisoned")])
def test_graphs_model_suite_passes(dtype: str, only: str) -> None:
    suite = str(HERE / "graphs_model")
    path = os.pathsep.join(filter(None, (str(HERE.parent / "support"), os.environ.get("PYTHONPATH"))))
    run = warm.SGLANG.run(
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", "-k", only, suite), timeout=1100,
        env={"PYTHONPATH": path, "LAPS_TEST_GRAPHS_MODEL": "1", "LAPS_TEST_DTYPE": dtype},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-12000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
