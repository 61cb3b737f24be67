"""Batches of short prefills from full graphs against SGLang's own prefill graphs, in one run. Needs a GPU.

    python -m benchmark.graphs                     Qwen2.5 shapes with dummy weights
    python -m benchmark.graphs --lengths FILE      prompt lengths from a column of a CSV (may be gzipped)
    python -m benchmark.graphs --shapes 7B --modes breakable graphs --concurrency 1 8 32 128 --prompts lmsys \
        --seconds 4 --rounds 2                     the short version: about five minutes on one GPU

A closed loop of N clients on a prefill server per mode, each prompt new. Modes take turns within a round and figures
are medians over rounds. What one batch takes on each path: ``benchmark.ladder``. Tables go to the terminal, all of it
to the folder of --out.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
import itertools
import json
import math
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmark.results.bars import Bar
from benchmark.results.piece import Figure, Piece, Table, command
from benchmark.rig import load, runner, servers, stats
from benchmark.rig.model import REPO

TRACE = Path(__file__).parent / "traces" / "lmsys_lengths.csv.gz"

MODES: dict[str, tuple[str, ...]] = {
    "disabled": ("--cuda-graph-backend-prefill", "disabled"),
    "breakable": ("--cuda-graph-backend-prefill", "breakable"),
    "full": ("--cuda-graph-backend-prefill", "full"),
    "laps": ("--enable-laps-scheduler",),
    "graphs": ("--enable-laps-scheduler", "--enable-batch-prefill-cuda-graph"),
}
"""``laps`` is the scheduler without full graphs: what it and they each contribute can be told apart."""
DEFAULT = "breakable"

SHORT = 256
LMSYS = ((0.0, 1), (0.1, 7), (0.5, 20), (0.9, 129), (0.99, 1180), (1.0, 4005))
"""Quantiles of the prompt lengths of LMSYS-Chat-1M (tokens, bytes / 4), where the list itself is not at hand."""

LEAST, BEST = Bar(least=0.98), Bar(least=1.15)
"""Requests/s with the graphs over those of stock, at the worst and at the best number of clients."""
PADDED, CAPTURE_S, CAPTURE_MIB = Bar(most=0.25), Bar(most=60.0), Bar(most=2048.0)
WEIGHTS_GIB = {"0.5B": 1.0, "7B": 15.3, "14B": 29.6, "32B": 65.5}


# -- prompts


def lengths_of(path: Path | None, count: int, rng: random.Random) -> list[int]:
    """Short prompt lengths (tokens), from a file's first column or from the quantiles above."""
    if path is not None:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        given = [int(row[0]) for row in csv.reader(text.decode().splitlines()) if row and row[0].isdecimal()]
    else:
        given = [_quantile(rng.random()) for _ in range(count)]
    return [n for n in given if n <= SHORT] or [SHORT]


def _quantile(at: float) -> int:
    for (p0, low), (p1, high) in itertools.pairwise(LMSYS):
        if at <= p1:
            part = (at - p0) / (p1 - p0)
            return round(math.exp(math.log(low) * (1 - part) + math.log(high) * part))
    return LMSYS[-1][1]


class Prompts:
    """New random prompts whose lengths follow a list."""

    def __init__(self, lengths: Sequence[int], vocabulary: int, seed: str) -> None:
        self._lengths, self._vocabulary = lengths, vocabulary
        self._rng = random.Random(seed)

    def __call__(self) -> list[int]:
        length = self._rng.choice(self._lengths)
        return [self._rng.randrange(10, self._vocabulary) for _ in range(length)]


# -- serving


async def closed_loop(url: str, clients: int, seconds: float, prompts: Prompts) -> tuple[list[load.Seen], float]:
    """``clients`` requests always in flight for ``seconds``. Returns what was seen and the time it took (seconds)."""
    epoch = time.perf_counter()
    seen: list[load.Seen] = []

    async def client(http: Any) -> None:
        while time.perf_counter() - epoch < seconds:
            seen.append(await load.prefill_only(http, url, prompts(), "short", epoch))

    async with load.session() as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return seen, time.perf_counter() - epoch


def status(server: servers.Server) -> dict[str, Any]:
    """The ``graphs`` part of /laps_status; empty for a stock server."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(server.url + "/laps_status", timeout=30) as reply:
            return dict(json.load(reply)["graphs"])
    except (urllib.error.HTTPError, KeyError):
        return {}


def captured(server: servers.Server) -> dict[str, Any]:
    """Prefill capture of this server: seconds and MiB, of the full graphs if it has any, else of the stock graphs."""
    graphs = status(server)
    if graphs.get("on"):
        return {k: graphs[k] for k in ("capture_s", "capture_mib", "row_counts", "faster")}
    log = server.log.read_text(errors="replace")
    found = re.search(r"target prefill CUDA graph end\. elapsed=([\d.]+) s, mem usage=([-\d.]+) GB", log)
    return {"capture_s": float(found[1]), "capture_mib": float(found[2]) * 1024} if found else {}


def measure(server: servers.Server, clients: int, seconds: float, prompts: Prompts) -> dict[str, Any]:
    """One round of one mode."""
    before = status(server)
    seen, took = asyncio.run(closed_loop(server.url, clients, seconds, prompts))
    after = status(server)
    good = [s for s in seen if s.error is None]
    figures: dict[str, Any] = {
        "per_s": len(good) / took,
        "tokens_per_s": sum(s.prompt_tokens for s in good) / took,
        "failed": stats.failed(seen),
        **stats.quantiles(stats.ttft_ms(seen, "short")),
    }
    if after.get("on"):
        batches, rows = (after[k] - before[k] for k in ("batches", "rows"))
        figures["hit_rate"] = (after["replayed"] - before["replayed"]) / batches if batches else 0.0
        figures["padded_share"] = (after["padded_rows"] - before["padded_rows"]) / rows if rows else 0.0
        figures["why"] = {k: n - before["why"].get(k, 0) for k, n in after["why"].items()}
    return figures


class Bench:
    """All modes of one model shape."""

    def __init__(self, args: argparse.Namespace, shape: str, folder: Path) -> None:
        self.args, self.shape, self.folder = args, shape, folder
        self.modes = {m: MODES[m] for m in args.modes}
        self.model = runner.write_shape(shape, folder / shape)
        self.flags = (
            "--dtype", "bfloat16", "--load-format", "dummy", "--skip-tokenizer-init",
            "--attention-backend", args.attention, "--sampling-backend", "pytorch", "--grammar-backend", "none",
            "--max-total-tokens", "131072", "--mem-fraction-static", "0.7", *args.flags,
        )  # fmt: skip

    def server(self, mode: str) -> servers.Server:
        log = self.args.out / "logs" / f"graphs-{self.shape}-{mode}.log"
        return servers.prefill(self.model, log, *self.flags, *self.modes[mode], name=f"{self.shape} {mode}")

    def together(self) -> bool:
        """Whether all modes fit in memory at once."""
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        return len(self.modes) * (1.3 * WEIGHTS_GIB[self.shape] + 12) < 0.9 * memory

    @contextmanager
    def up(self, modes: Sequence[str]) -> Iterator[dict[str, servers.Server]]:
        with ExitStack() as stack:
            started = {}
            for mode in modes:
                print(f"  starting {self.shape} {mode}", flush=True)
                server = self.server(mode)
                stack.enter_context(servers.running(server, timeout_s=900.0))
                started[mode] = server
            yield started

    def run(self) -> dict[str, Any]:
        """Medians over rounds per prompts, clients and mode."""
        rounds: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
        capture: dict[str, dict[str, Any]] = {}
        names = list(self.modes)
        for at in range(self.args.rounds):
            order = names if at % 2 == 0 else names[::-1]
            for group in [order] if self.together() else [[m] for m in order]:
                with self.up(group) as up:
                    capture |= {m: captured(s) for m, s in up.items()}
                    self._round(up, at, rounds)
        rows = []
        for (kind, clients, mode), seen in rounds.items():
            row: dict[str, Any] = {"prompts": kind, "clients": clients, "mode": mode}
            for key in seen[0]:
                values = [s[key] for s in seen if isinstance(s[key], (int, float))]
                if values:
                    row[key] = sum(values) if key == "failed" else round(statistics.median(values), 4)
            row["why"] = seen[-1].get("why")
            rows.append(row)
        return {"shape": self.shape, "capture": capture, "rows": rows}

    def _round(self, up: dict[str, servers.Server], at: int, rounds: dict[tuple[str, int, str], Any]) -> None:
        vocabulary = 150000
        kinds = {
            "lmsys": lengths_of(self.args.lengths, 10000, random.Random(1)),
            "uniform": list(range(1, SHORT + 1)),
        }
        for server in up.values():
            warm = Prompts(kinds["uniform"], vocabulary, seed=f"warm {self.args.seed}")
            asyncio.run(closed_loop(server.url, max(self.args.concurrency), self.args.warm, warm))
        for kind in self.args.prompts:
            for clients in self.args.concurrency:
                for mode, server in up.items():
                    # The same prompts for every mode.
                    prompts = Prompts(kinds[kind], vocabulary, seed=f"{kind} {clients} {at} {self.args.seed}")
                    figures = measure(server, clients, self.args.seconds, prompts)
                    rounds.setdefault((kind, clients, mode), []).append(figures)


# -- what it shows


COLUMNS = (
    "prompts", "clients", "mode", "per_s", "tokens_per_s", "p50_ms", "p90_ms", "p99_ms", "hit_rate", "padded_share",
    "failed",
)  # fmt: skip


def table(result: dict[str, Any]) -> Table:
    """All that was measured of one shape; medians over rounds."""
    cells = [["-" if row.get(c) is None else str(row[c]) for c in COLUMNS] for row in result["rows"]]
    return Table(f"Short prompts, {result['shape']}", [c.replace("_", " ") for c in COLUMNS], cells)


def figures(result: dict[str, Any]) -> list[Figure]:
    """What the full graphs have to reach, for one shape."""
    at = {(r["prompts"], r["clients"], r["mode"]): r for r in result["rows"]}
    ratios = {
        (kind, clients): row["per_s"] / at[kind, clients, DEFAULT]["per_s"]
        for (kind, clients, mode), row in at.items()
        if mode == "graphs" and (kind, clients, DEFAULT) in at and at[kind, clients, DEFAULT]["per_s"]
    }
    found = []

    def add(what: str, value: float | None, bar: Bar) -> None:
        if value is not None:
            found.append(Figure.of(f"{result['shape']}: {what}", value, bar))

    if ratios:
        low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        told = "requests/s, graphs / {}, {} prompts, {} clients"
        add(told.format(DEFAULT, *low), ratios[low], LEAST)
        add(told.format(DEFAULT, *high), ratios[high], BEST)
    add("padded share at 32 clients, LMSYS lengths", at.get(("lmsys", 32, "graphs"), {}).get("padded_share"), PADDED)
    capture = result["capture"].get("graphs") or {}
    add("capture (s)", capture.get("capture_s"), CAPTURE_S)
    add("capture (MiB)", capture.get("capture_mib"), CAPTURE_MIB)
    return found


def picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Requests/s and P99 over concurrency, a row per shape and prompts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(r, kind) for r in results for kind in dict.fromkeys(row["prompts"] for row in r["rows"])]
    figure, axes = plt.subplots(len(panels), 2, figsize=(11, 3.4 * len(panels)), squeeze=False)
    for (result, kind), (rate, tail) in zip(panels, axes, strict=True):
        for mode in dict.fromkeys(row["mode"] for row in result["rows"]):
            rows = [r for r in result["rows"] if r["prompts"] == kind and r["mode"] == mode]
            x = [r["clients"] for r in rows]
            rate.plot(x, [r["per_s"] for r in rows], marker="o", label=mode)
            tail.plot(x, [r["p99_ms"] for r in rows], marker="o", label=mode)
        for axis, what in ((rate, "requests/s"), (tail, "TTFT P99 (ms)")):
            axis.set(xscale="log", xlabel="clients", ylabel=what, title=f"{result['shape']}, {kind} prompts")
            axis.grid(alpha=0.3)
        tail.set_yscale("log")
        rate.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def device() -> str:
    """What this ran on."""
    return str(torch.cuda.get_device_name(0))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.5B", "7B", "14B", "32B"], choices=list(WEIGHTS_GIB))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--prompts", nargs="+", default=["lmsys", "uniform"], choices=["lmsys", "uniform"])
    listed = TRACE if TRACE.exists() else None
    parser.add_argument("--lengths", type=Path, default=listed, help="prompt lengths, first column of a CSV")
    parser.add_argument("--seconds", type=float, default=8.0, help="one measurement")
    parser.add_argument(
        "--warm", type=float, default=10.0, help="load before the first measurement of a server (seconds)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention", default="fa3", help="attention backend")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more server options; last")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' tokens")
    parser.add_argument("--out", type=Path, default=REPO / "out" / "graphs")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("Nothing was measured: CUDA graphs need a GPU, and there is none here.")
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    text = (
        f"Batches of short prefills from full graphs against SGLang's own prefill graphs on one {device()}, dummy "
        f"weights of Qwen2.5 shapes; lengths: {args.lengths.name if args.lengths else 'quantiles of LMSYS-Chat-1M'}."
    )
    piece = Piece("graphs", "Full graphs for short prefills", text, args.seed, [], [], data={"results": []})
    piece.command = command("benchmark.graphs", argv)
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            print(f"{shape} on {device()}", flush=True)
            result = Bench(args, shape, Path(folder)).run()
            piece.tables = [*piece.tables, table(result)]
            piece.figures += figures(result)
            piece.data["results"].append(result)
            print(piece.tables[-1], flush=True)
            # After each shape: a run that is cut off keeps what it has.
            piece.write(args.out)
    picture(piece.data["results"], args.out / "graphs.png")
    piece.pictures["graphs.png"] = "Requests/s and P99 TTFT of short prompts over clients, by prefill graphs."
    piece.write(args.out)
    for figure in piece.figures:
        print(figure)
    print(args.out)


if __name__ == "__main__":
    main()
