"""One model under the full graphs and under SGLang's own path, held against each other."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CONTEXT = 1024


DTYPE = os.environ.get("LAPS_TEST_DTYPE", "float32")
"""On the CPU; a GPU serves bfloat16."""


VOCABULARY = 512


LENGTHS, SLOTS, MOST = (8, 32, 128), (1, 2, 4, 8, 16), 192


def config(**knobs: Any) -> Any:
    from laps_core.config import LapsConfig

    given = {"graph_lengths": LENGTHS, "graph_batches": SLOTS, "graph_strategy": "memory"}
    return LapsConfig(**{"graphs": True, **given, **knobs})


@contextmanager
def graphs(runner: Any, **knobs: Any) -> Iterator[Any]:
    """Yield the runner's front, or the reason there is none; leave the runner as it was."""
    from sglang_laps.graphs import attach, capture

    # SGLang keeps one such object per attention backend, for one number of request slots.
    kept: list[tuple[Any, str]] = [(runner, "prefill_cuda_graph_runner"), (runner, "laps_graphs")]
    kept += [(runner.attn_backend, "full_cg_prefill_metadata"), (capture, "MOST_ROWS")]
    held = [getattr(owner, name, None) for owner, name in kept]
    vars(capture)["MOST_ROWS"] = MOST
    runner.prefill_cuda_graph_runner = runner.stock_path
    runner.attn_backend.full_cg_prefill_metadata = None
    try:
        attach(runner, config(**knobs))
        yield runner.laps_graphs
    finally:
        for (owner, name), value in zip(kept, held, strict=True):
            setattr(owner, name, value)


def random_ids(rng: random.Random, count: int) -> list[int]:
    # Token 0 is what padded rows carry; some tests poison it.
    return [rng.randrange(1, VOCABULARY) for _ in range(count)]


def extend_request(req: Any, ids: Sequence[int]) -> Any:
    """Return the same request with ``ids`` after its cached tokens."""
    req.prefix_len = len(req.full_untruncated_fill_ids)
    req.full_untruncated_fill_ids.extend(ids)
    req.logprob_start_len = -1
    req.extend_end = len(req.full_untruncated_fill_ids)
    return req


def make_noise(model: Any, seed: int) -> None:
    """Fill in weights large enough that every token and position changes the output. In place, so that graphs see
    them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator) * (0.08 if weight.ndim > 1 else 0.1)
        weight.data.copy_(noise + 1.0 if name.endswith("norm.weight") else noise)


@dataclass
class PrefillResult:
    """Result of one prefill of a batch. ``logits``: (requests, vocabulary), float32 on the CPU."""

    tokens: list[int]
    logits: Any
    graph: bool


def prefill(runner: Any, reqs: list[Any]) -> PrefillResult:
    """Run ``reqs`` as one prefill batch."""
    import torch

    from benchmark.rig import runner as rig

    with torch.no_grad():
        batch = rig.forward_batch(runner, reqs)
        output = runner.forward(batch)
        tokens = runner.sample(output.logits_output, batch)
    return PrefillResult(
        tokens.tolist(), output.logits_output.next_token_logits.float().cpu(), bool(output.can_run_graph)
    )


def read_kv(runner: Any, req: Any) -> list[Any]:
    """Keys and values a request has cached, per layer: (tokens, heads, head size), on the CPU."""
    slots = runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.extend_end].long()
    pool = runner.token_to_kv_pool
    layers = range(runner.model_config.num_hidden_layers)
    return [
        buffer[slots].float().cpu()
        for layer in layers
        for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer))
    ]


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
            prefill(runner, cached)
        reqs = [extend_request(r, new) if old else r for r, new, old in zip(first, news, olds, strict=True)]
        runner.prefill_cuda_graph_runner = path
        turn = prefill(runner, reqs)
    finally:
        runner.prefill_cuda_graph_runner = held
    return turn, [read_kv(runner, r) for r in reqs]


def require_equal_results(
    runner: Any, front: Any, news: list[list[int]], olds: list[list[int]] | None, cuda: bool
) -> int:
    """Serve by the stock path and by the front, and hold them against each other. Returns the replays."""
    import torch

    want, want_kv = serve(runner, front.stock, news, olds)
    before = front.replayed
    got, got_kv = serve(runner, front, news, olds)
    rough = cuda or DTYPE == "bfloat16"
    # bfloat16 holds logits of 4 to 8 in steps of 1/32: three of them.
    tight: dict[str, Any] = {"rtol": 2e-2, "atol": 3 / 32} if rough else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got.logits, want.logits, **tight)
    for a, b in zip(got_kv, want_kv, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, **tight)
    for mine, theirs, row in zip(got.tokens, want.tokens, want.logits, strict=True):
        top = row.topk(2).values
        if top[0] - top[1] > (0.2 if rough else 1e-3):
            assert mine == theirs
    return int(front.replayed - before)


@contextmanager
def poison_padding(runner: Any) -> Iterator[None]:
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
