"""A prefill server with forced, taped graphs: every token as without graphs, no leftovers, all ranks in step."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, random_prompt, request_body, run_on, send_all

from benchmark.rig import model

# Three requests that are sent together form one batch, even on a slow machine.
WINDOW = ("--laps-wait-window-ms", "300", "--laps-wait-max-batch", "3")
KNOBS = {"window": "fixed", "graph_strategy": "always"}
GRID = ("--batch-prefill-seq-lengths", "16", "64", "256", "--batch-prefill-batch-sizes", "1,4,16")
SHAPE = model.Shape(hidden=64, layers=2, heads=2, intermediate=176)
"""Small model, because each row count is captured and timed operator by operator."""
CHUNK = 256
"""Largest row count; each row count up to it is captured and timed."""
GRAPHS = (
    *LAPS,
    *WINDOW,
    "--chunked-prefill-size",
    str(CHUNK),
    "--enable-batch-prefill-cuda-graph",
    *GRID,
    "--laps-config",
    json.dumps(KNOBS),
)
SUPPORT = Path(__file__).parents[1] / "support"
TAPE = {"PYTHONPATH": os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))}
"""Environment that makes ``graph_tape`` a plugin of SGLang."""
PIECEWISE = "--enable-piecewise-cuda-graph"
pytestmark = run_on(
    Setup("graphs-normal", (*GRAPHS, *NORMAL_LOOP), TAPE, SHAPE),
    Setup("graphs-overlap", (*GRAPHS, PIECEWISE), TAPE, SHAPE),
    Setup(
        *("graphs-tp2", (*GRAPHS, *NORMAL_LOOP, "--tp-size", "2")),
        *({**TAPE, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, SHAPE),
    ),
)


def graphs(prefill: Prefill) -> dict[str, Any]:
    return dict(prefill.get("/laps_status")["graphs"])


def test_server_reports_captured_row_counts(prefill: Prefill) -> None:
    seen = graphs(prefill)
    assert seen["on"]
    assert seen["row_counts"] == seen["faster"] == [
        *range(8, 64, 8), *range(64, 128, 16), *range(128, CHUNK + 1, 32),
    ]  # fmt: skip
    assert seen["capture_s"] > 0
    log = prefill.server.log.read_text(errors="replace")
    assert "LAPS graphs: 16 row counts captured" in log
    assert "which SGLang calls experimental" in log
    assert (f"{PIECEWISE} is ignored" in log) == (PIECEWISE in prefill.setup.args)


def test_tokens_with_graphs_equal_transformers(prefill: Prefill, reference: Reference) -> None:
    rng = random.Random(4)
    firsts = [random_prompt(500 + i, rng.randint(3, 200)) for i in range(16)]
    turns = [p + random_prompt(900 + i, rng.randint(3, 60)) for i, p in enumerate(firsts)]
    long = random_prompt(7, 2 * CHUNK + 9)
    before = graphs(prefill)
    answers = [asyncio.run(send_all(prefill, batch)) for batch in (firsts, [*turns, long], turns)]
    after = graphs(prefill)
    assert after["replayed"] > before["replayed"]
    assert after["padded_rows"] > before["padded_rows"]
    assert set(after["why"]) <= {"faster", "no-graph", "unsupported"}
    for i in range(0, 16, 2):
        assert answers[0][i] == reference.greedy(firsts[i], 1)[0], f"first turn {i}: {len(firsts[i])} tokens"
        want = reference.greedy(turns[i], 1)[0]
        assert answers[1][i] == answers[2][i] == want, f"second turn {i}: {len(turns[i])} tokens"
    assert answers[1][-1] == reference.greedy(long, 1)[0]


def test_input_logprobs_equal_transformers(prefill: Prefill, reference: Reference) -> None:
    prompt = random_prompt(31, 20)
    replies = []
    for room in (71, 72):
        body = {**request_body(room, prompt), "return_logprob": True, "logprob_start_len": 0}
        status, text = prefill.post("/generate", body)
        assert status == 200, text
        replies.append(json.loads(text)["meta_info"]["input_token_logprobs"])
    import torch

    with torch.inference_mode():
        logits = reference.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    want = [float(logits[i, t]) for i, t in enumerate(prompt[1:])]
    for got in replies:
        assert [x[0] for x in got[1:]] == pytest.approx(want, abs=1e-3)
