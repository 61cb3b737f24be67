"""Check of first tokens under preemption: each prompt alone on a stock server, then all at once on one with LAPS."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.load import Prompts, without_decode_server
from benchmark.results import Bar, Figure, Piece, Table
from benchmark.rig import CPU, CUDA, DEVICES, FCFS, LAPS, ON, Device, Fleet, Progress, Variant, devices, get_json, model

SHAPES = {
    CUDA: model.Shape(hidden=512, layers=24, heads=8, kv_heads=2, intermediate=2048),
    CPU: model.Shape(hidden=64, layers=12, heads=2, kv_heads=2, intermediate=512),
}
LONGS, SHORTS = 32, 200
LONG_CLIENTS, SHORT_CLIENTS = 4, 3
TOKENS = {CUDA: (4096, 8000), CPU: (600, 1000)}
"""Shortest and longest of the long prompts."""
TIE = 0.05
"""Difference of the two best tokens' log-probabilities below which rounding can decide between them."""
EVERY_LAYER = {"slice_ms": 0.01, "preempt_overhead": 1.0}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """First token of a prompt, and its certainty."""

    token: int
    best: float
    """Log-probability of the token."""
    ahead: float
    """Log-probability of the token less that of the second-best token."""


def small(cuda: bool, ranks: int) -> Device:
    """Return a device with a small model. Its weights are seeded, not dummies, so that equal answers mean something."""
    name = CUDA if cuda else CPU
    known = DEVICES[name]
    args = [a for a in known.args if a != devices.NORMAL_LOOP]
    real = ("--load-format", "auto") if cuda else ()
    tp = ("--tp-size", str(ranks)) if ranks > 1 else ()
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 and not cuda else {}
    return replace(
        known, args=(*args, *real, *tp), env={**known.env, **env}, layers=SHAPES[name].layers,
        checkpoint=lambda: model.make(devices.MODELS, SHAPES[name]), vocabulary=model.VOCABULARY, longest=8192,
        chunk=8192 if cuda else 1024, what="a small model with seeded weights",
    )  # fmt: skip


def ask(url: str, ids: list[int], bootstrap_room: int) -> Answer:
    """Send a prompt to a server without a decode server; return the answer. Raises OSError, ConnectionError."""
    body = {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True,
        "top_logprobs_num": 2, **without_decode_server(bootstrap_room),
    }  # fmt: skip
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        said: dict[str, Any] = json.load(reply)
    if not said.get("output_ids"):
        raise ConnectionError(f"{url} answered without a token")
    (best, _, _), (second, _, _) = said["meta_info"]["output_top_logprobs"][0]
    return Answer(int(said["output_ids"][0]), float(best), float(best) - float(second))


def answers(out: Path, seed: int, say: Progress, *, cuda: bool, ranks: int = 1) -> Piece:
    """Compare both servers' answers. Raises ServerError, OSError."""
    device = small(cuda, ranks)
    rng = random.Random(seed)
    low, high = TOKENS[device.name]
    lengths = [rng.randint(low, high) for _ in range(LONGS)] + [rng.randint(1, 200) for _ in range(SHORTS)]
    asked = [[rng.randrange(*device.vocabulary) for _ in range(n)] for n in lengths]
    prompts = Prompts(device.vocabulary, seed, device.longest)
    servers = [Variant(FCFS, ()), Variant(LAPS, (ON,), knobs=EVERY_LAYER)]
    with Fleet(device, servers, prompts, out, say) as fleet:
        url = fleet.target(FCFS).url
        alone = [ask(url, ids, rng.getrandbits(60)) for ids in asked]
        url = fleet.target(LAPS).url
        before = preemptions(fleet)
        rooms = [rng.getrandbits(60) for _ in asked]
        # Short prompts arrive during the whole time that long prompts run.
        with ThreadPoolExecutor(LONG_CLIENTS) as long, ThreadPoolExecutor(SHORT_CLIENTS) as short:
            pools = [long] * LONGS + [short] * SHORTS
            sent = [pools[i].submit(ask, url, ids, rooms[i]) for i, ids in enumerate(asked)]
            together = [answer.result() for answer in sent]
        preempted = preemptions(fleet) - before
    return piece_of(alone, together, lengths, preempted, device, ranks, seed)


def preemptions(fleet: Fleet) -> int:
    """Return the number of preemptions by short batches on the server with LAPS."""
    status = get_json(fleet.prefill(LAPS), "/laps_status") or {}
    return int(status.get("preemption", {}).get("by_short_batches", 0))


def piece_of(
    alone: Sequence[Answer], together: Sequence[Answer], lengths: Sequence[int], preempted: int, device: Device,
    ranks: int, seed: int,
) -> Piece:  # fmt: skip
    """Return the piece of both servers' answers, in the order of ``lengths`` (tokens)."""
    pairs = [*zip(alone, together, strict=True)]
    other = [(a, b) for a, b in pairs if a.token != b.token]
    wrong = sum(a.ahead > TIE for a, _ in other)
    apart = max(abs(a.best - b.best) for a, b in pairs)
    figures = [
        Figure.of("first tokens that differ where the model was sure", float(wrong), Bar(most=0.0)),
        Figure.of("short batches that preempted", float(preempted), Bar(least=1.0)),
        Figure("first tokens that differ in all", float(len(other))),
        Figure("largest difference of a log-probability", apart),
    ]
    rows = [
        (kind, str(len(part)), str(sum(a.token != b.token for a, b in part)))
        for kind, part in (("long", pairs[:LONGS]), ("short", pairs[LONGS:]))
    ]
    text = (
        f"{device.what}, {ranks} rank{'s' * (ranks > 1)}: each prompt alone on stock SGLang, then all at once, a pause "
        "after each layer, on a server with LAPS in the overlap loop."
    )
    table = Table("First tokens", ("prompts", "asked", "that differ"), rows)
    data = {"lengths": list(lengths), "alone": [vars(a) for a in alone], "together": [vars(a) for a in together]}
    title = "Right answers under preemption" + (f", {ranks} ranks" if ranks > 1 else "")
    return Piece("answers", title, text, seed, [table], figures, data=data)
