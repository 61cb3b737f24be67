"""Scheduler variants on the same work, in one run, on real servers.

    python -m benchmark.serve --workload mixed                           # stock policies and LAPS, prefill only
    python -m benchmark.serve --workload turns --pd                      # through router and decode server
    python -m benchmark.serve --workload azure --variant 'half=--enable-laps-scheduler --laps-config {"guard":0.5}'
    python -m benchmark.serve --variants laps --variant 'old=PYTHONPATH=../old/python --enable-laps-scheduler'
    python -m benchmark.serve --base-url http://host:30000               # a server that runs already
    python -m benchmark.serve --check-client                             # this client next to SGLang's bench_serving

Variants are compared in turns (A B C, C B A, ...) under the same seeded arrivals; a ratio is the median of per-round
ratios with the interval that the rounds support, and five rounds are the fewest that support any. Open loads are scaled
to what stock fcfs (the first variant where that is not among them) does on this machine in a closed loop.

Prefill only means: one prefill server without a decode server, through SGLang's fake bootstrap host. SGLang caches no
prefix of such requests, so only new tokens are sent; --pd shows reuse. An emulated device caches them where the prompts
of a workload share beginnings, and holds histories that are older than the load.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from laps_plan.pictures import distributions
from laps_plan.traffic import named

from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.load.sessions import SessionPrompts
from benchmark.results import pictures
from benchmark.results.metrics import KINDS, curve
from benchmark.results.piece import Parser, Piece, count, parser, positive
from benchmark.rig import devices, model, variants
from benchmark.rig.devices import CUDA, Device
from benchmark.rig.fleet import Fleet, Running, command_line, warm_up
from benchmark.rig.progress import Progress
from benchmark.serve import check, tables
from benchmark.serve.compare import Bench, Compared, Points, Settings

BASE = variants.FCFS
THERE = "the server"
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Clients of closed loops."""
LONG_CHUNKS = 4
"""Length of a usual long prompt, in chunks."""


def options() -> Parser:
    p = parser("python -m benchmark.serve", __doc__, None, rounds="(5)", seed=1, seconds=10.0, whole=True)
    devices.add_device(p)
    names = ", ".join((named.CLOSED, *named.OPEN))
    p.add_argument("--workload", default="mixed", help=f"{names}; several, with commas: a folder each (mixed)")
    p.add_argument("--variants", help=f"built-in ones, separated by commas: {', '.join(variants.BUILT_IN)}")
    p.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME='[VARIABLE=VALUE] ARGS'",
        help="a variant of your own; repeatable",
    )
    p.add_argument("--against", help=f"variant to compare with ({BASE}, or the first)")
    p.add_argument("--utilisation", type=positive, default=0.6, help="offered work over capacity (0.6)")
    p.add_argument("--capacity", type=positive, metavar="RATE", help="what to take for capacity, requests/s (measured)")
    p.add_argument("--concurrency", type=count, nargs="+", default=list(CLIENTS), help="clients of --workload closed")
    p.add_argument("--slo-factor", type=positive, default=10.0, help="in time: TTFT of at most N lone TTFTs (10)")
    p.add_argument("--goodput", action="store_true", help="search the highest rate with 90%% of each class in time")
    p.add_argument("--pd", action="store_true", help="end to end through router and decode server")
    p.add_argument("--base-url", metavar="URL", help="use the server at URL; none is started")
    p.add_argument("--chunk", type=count, help="--chunked-prefill-size of every server, tokens (cpu 1024, cuda 4096)")
    p.add_argument("--longest", type=count, help="longest prompt, tokens (cpu 4096, cuda 65536)")
    p.add_argument("--servers", choices=("auto", "together", "turns"), default="auto", help="all up, or one at a time")
    p.add_argument("--check-client", action="store_true", help="only compare this client with sglang.bench_serving")
    return p


def checked(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments, with device, variants, chunk and longest filled in. Exits with one line if they are
    invalid."""
    p = options()
    args = p.parse_args(argv)
    device: Device = args.device
    try:
        given = [variants.given(text) for text in args.variant]
        names = args.variants.split(",") if args.variants else list(device.variants)
        found = variants.chosen(names, given, cuda=device.name == CUDA)
        if args.base_url:
            if args.variants or args.variant or args.pd or args.check_client:
                raise ValueError("--base-url is one running server: no --variants, --variant, --pd or --check-client")
            Target.of(args.base_url)
            found = [variants.Variant(THERE, ())]
        args.workload = args.workload.split(",")
        for name in args.workload:
            if name != named.CLOSED and name not in named.OPEN:
                raise ValueError(f"no workload {name!r}: {', '.join((named.CLOSED, *named.OPEN))}")
        if args.against and args.against not in {v.name for v in found}:
            raise ValueError(
                f"--against {args.against!r} is not among the variants: {', '.join(v.name for v in found)}"
            )
        if args.longest and args.longest < 512:
            raise ValueError("--longest is at least 512 tokens")
    except ValueError as e:
        p.error(str(e))
    args.variants, args.chunk, args.longest = found, args.chunk or device.chunk, args.longest or device.longest
    return args


def base_of(names: Sequence[str], wanted: str | None) -> str:
    """Return the variant that others are compared with."""
    return wanted or (BASE if BASE in names else names[0])


def raw(compared: Compared, path: Path) -> None:
    """Write every request: variant, round, time, class, tokens, TTFT."""
    with gzip.open(path, "wt", encoding="utf-8", newline="") as f:
        out = csv.writer(f)
        out.writerow(("variant", "round", "sent_s", "kind", "new_tokens", "cached_tokens", "ttft_ms"))
        for name, rounds in compared.answers.items():
            for i, answers in enumerate(rounds):
                for a in answers:
                    ttft = "" if a.ttft_s is None else f"{a.ttft_s * 1e3:.3f}"
                    out.writerow((name, i, f"{a.sent_s:.4f}", a.job.kind, a.job.new, a.job.cached, ttft))


def piece_of_open(
    name: str, compared: Compared, workload: named.Workload, base: str, settings: Settings, how: str, out: Path
) -> Piece:
    """Return tables, ratios and the picture of a comparison; writes ``requests.csv.gz`` beside them."""
    out.mkdir(parents=True, exist_ok=True)
    raw(compared, out / "requests.csv.gz")
    seen = {name: [a for answers in rounds for a in answers] for name, rounds in compared.answers.items()}
    curves = {kind: {n: curve(answers, kind) for n, answers in seen.items()} for kind in KINDS}
    title = f"{workload.name} at {settings.utilisation:.0%} of capacity"
    picture = f"{name}.svg"
    distributions(curves, title, out / picture)
    over, figures = tables.ratios(compared, base)
    figures = [*tables.judged(compared, workload.name), *figures]
    offered = len(next(iter(compared.answers.values()))[0]) / settings.span_s
    measured = f"that {compared.measured.on} does in a closed loop of the workload's "
    measured += "short prompts" if isinstance(workload, named.Sea) else "prompts"
    text = (
        f"{workload.what}. {how} Offered: {settings.utilisation:.0%} of the {compared.measured.capacity_per_s:.1f} "
        f"requests/s {'given as capacity' if settings.capacity_per_s else measured}, {offered:.1f} requests/s in the "
        f"first round; {settings.rounds} rounds of {settings.span_s:g} s of arrivals, the same for every variant."
    )
    if workload.reuses and "new tokens only" in how:
        text += " Its prompts share beginnings, which a prefill server alone cannot show: see the run with --pd."
    return Piece(
        name=name,
        title=title,
        text=text,
        seed=settings.seed,
        tables=[*tables.results(compared, title), *over],
        figures=figures,
        pictures={picture: "Distribution of the time to first token; the dotted line is P90."},
        data={
            "settings": vars(settings),
            "measured": compared.measured.as_dict(),
            "rounds": {n: compared.per_round(n) for n in seen},
            "pooled": {n: compared.pooled(n) for n in seen},
            "busy": compared.busy,
            "goodput_per_s": compared.goodput_per_s,
            "curves_ms": curves,
        },
    )


def how_served(device: Device, chunk: int, pd: bool, new_only: bool) -> str:
    """Return a description for the report."""
    path = "Router, prefill and decode server, end to end" if pd else "A prefill server alone"
    return f"{path}{', new tokens only' if new_only else ''}; chunks of {chunk} tokens, {device.what}."


def main(argv: Sequence[str] | None = None) -> int:
    args, say = checked(argv), Progress()
    with command_line("serve"):
        if args.check_client:
            out = args.out or model.REPO / "out" / "client-check"
            made = iter([(check.run(args, out, say), out)])
        else:
            made = compared(args, say)
        for piece, out in made:
            piece.leave(out, "benchmark.serve", argv)
    return 0


def compared(args: argparse.Namespace, say: Progress, up: Fleet | None = None) -> Iterator[tuple[Piece, Path]]:
    """Yield a piece for each workload when it is done, and its folder; all on the same servers, on ``up`` if given.
    ``args``: as from ``checked``."""
    device, chunk, longest = args.device, args.chunk, args.longest
    running = Running.at(args.base_url) if args.base_url else None
    prefill_only = running.prefill_only if running else not args.pd
    scale = named.Scale(longest, min(longest, LONG_CHUNKS * chunk))
    reuses = any(name != named.CLOSED and named.make(name, scale).reuses for name in args.workload)
    if reuses and device.emulated and not (running or args.pd):
        device = device.with_prefixes()
    reuse = device.prefixes or not prefill_only
    kind = SessionPrompts if device.prefixes else Prompts
    prompts = kind(device.vocabulary, args.seed, longest, reuse=reuse, prefill_only=prefill_only)
    together = {"auto": None, "together": True, "turns": False}[args.servers]
    names = [v.name for v in args.variants]
    base = base_of(names, args.against)
    settings = Settings(
        args.rounds, args.seconds, args.utilisation, args.seed, args.slo_factor, longest, capacity_per_s=args.capacity
    )
    how = how_served(device, chunk, args.pd, new_only=not reuse)
    if running:
        how = f"The server at {running.url.url}."
    # Results of the same load on this machine must stay, so use folders of their own.
    prefix = "emulated-" if device.emulated else ""
    folders = [model.REPO / "out" / f"serve-{prefix}{w}" for w in args.workload]
    if args.out:
        folders = [args.out / f"{prefix}{w}" for w in args.workload] if len(args.workload) > 1 else [args.out]
    fleet = up or Fleet(device, chunk, args.variants, args.pd, folders[0], prompts, say, together)
    with nullcontext() if up or running else fleet:
        bench = Bench(running or fleet, names, prompts, settings, say)
        if running:
            warm_up(running.url, prompts, longest)
        for name, out in zip(args.workload, folders, strict=True):
            workload = named.make("lmsys" if name == named.CLOSED else name, scale)
            if name == named.CLOSED:
                yield _closed(bench.closed(workload, args.concurrency), names, base, how, args, out), out
                continue
            measured = bench.measure(base_of(names, None), workload)
            seen = bench.run(workload, measured)
            if args.goodput:
                seen.goodput_per_s = bench.goodput(workload, measured)
            yield piece_of_open(prefix + name, seen, workload, base, settings, how, out), out


def _closed(points: Points, names: Sequence[str], base: str, how: str, args: argparse.Namespace, out: Path) -> Piece:
    over, figures, data = tables.closed(points, names, base, variants.LAPS if base == BASE else None)
    picture = "closed.svg"
    panels = {
        label: {name: [statistics.median(points[n][name][key]) for n in sorted(points)] for name in names}
        for key, label in (("requests_per_s", "requests/s"), ("p90_ms", "TTFT P90 (ms)"))
    }
    pictures.lines(sorted(points), panels, "clients", out / picture, title="Closed loop of LMSYS lengths")
    text = f"Closed loops of prompts with LMSYS-Chat-1M lengths. {how} {args.rounds} rounds of {args.seconds:g} s."
    captions = {picture: "Requests/s and TTFT P90 over the number of clients."}
    return Piece("closed", "Closed loops", text, args.seed, over, figures, captions, data)
