"""The full graphs against the stock path, on one model in this process: captured on a GPU, taped elsewhere.

SGLang publishes one server configuration per process, so ``test_graphs.py`` runs this folder in its own interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .models import CONTEXT, DTYPE, graphs, make_noise

collect_ignore_glob = [] if os.environ.get("LAPS_TEST_GRAPHS_MODEL") == "1" else ["test_*.py"]


@pytest.fixture(scope="session")
def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory, cuda: bool) -> Any:
    from benchmark.rig import model as small
    from benchmark.rig import runner as rig

    model = small.write_shape("tiny", tmp_path_factory.mktemp("model"), context=CONTEXT)
    flags = ["--max-total-tokens", "16384", "--max-running-requests", "64", "--chunked-prefill-size", "2048"]
    device = ["--dtype", "bfloat16", "--attention-backend", "fa3"] if cuda else ["--device", "cpu", "--dtype", DTYPE]
    made = rig.boot(Path(model), *flags, *device)
    make_noise(made.model, 7)
    made.stock_path = made.prefill_cuda_graph_runner
    return made


@pytest.fixture(scope="session")
def always(runner: Any) -> Iterator[Any]:
    """Graphs that are replayed whenever they hold a batch."""
    with graphs(runner, graph_strategy="always") as front:
        yield front
