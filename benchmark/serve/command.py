"""Scheduler variants on the same work, in one run, on real servers.

    python -m benchmark.serve --workload mixed                           # stock policies and LAPS, prefill only
    python -m benchmark.serve --workload turns --pd                      # through router and decode server
    python -m benchmark.serve --workload azure --variant 'half=--enable-laps-scheduler --laps-config {\\"guard\\":0.5}'
    python -m benchmark.serve --variants laps --variant 'old=PYTHONPATH=../old/python --enable-laps-scheduler'

Variants run in turns (A B C, C B A, ...) under the same seeded arrivals. A ratio is the median of per-round ratios with
the interval that the rounds support, which takes at least five rounds. Open loads are a share of the capacity of stock
fcfs (or of the first variant, if fcfs is not among them): measured in a closed loop, or simulated if emulated.

Prefill only means: one prefill server without a decode server, through SGLang's fake bootstrap host. SGLang caches no
prefix of such requests, so only new tokens are sent; --pd shows reuse. Emulated devices cache prefixes if the prompts
of a workload share them, and hold histories that are older than the load.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from laps_plan.pictures import distributions
from laps_plan.traffic import named

from benchmark.load import Prompts, SessionPrompts
from benchmark.results import KINDS, Command, Parser, Piece, at_least, count, curve, pictures, positive, some_of
from benchmark.rig import CUDA, FCFS, Device, Fleet, devices, model, variants
from benchmark.serve import tables
from benchmark.serve.compare import BLOCK, BLOCKS, SIMULATED, Bench, Compared, Points, Settings, simulated

CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128)
LONG_CHUNKS = 4
"""Length of a usual long prompt, in chunks."""
WORKLOADS = (named.CLOSED, *named.OPEN)


def options(p: Parser) -> None:
    devices.add_device(p)
    words = f"{', '.join(WORKLOADS)}; several, with commas: a folder each (mixed)"
    p.add_argument("--workload", type=some_of(WORKLOADS, "workload"), default="mixed", help=words)
    p.add_argument("--variants", help=f"built-in ones, separated by commas: {', '.join(variants.BUILT_IN)}")
    words = "a variant of your own; repeatable"
    p.add_argument("--variant", action="append", default=[], metavar="NAME='[VARIABLE=VALUE] ARGS'", help=words)
    p.add_argument("--utilisation", type=positive, default=0.6, help="offered work over capacity (0.6)")
    p.add_argument(
        "--capacity", type=positive, metavar="RATE", help="capacity, requests/s (measured; simulated if emulated)"
    )
    p.add_argument("--concurrency", type=count, nargs="+", default=list(CLIENTS), help="clients of --workload closed")
    p.add_argument("--pd", action="store_true", help="end to end through router and decode server")
    p.add_argument("--chunk", type=count, help="--chunked-prefill-size of every server, tokens (cpu 1024, cuda 4096)")
    p.add_argument("--longest", type=at_least(512), help="longest prompt, tokens (cpu 4096, cuda 65536)")


def check_arguments(args: argparse.Namespace) -> None:
    """Fill in device and variants. Raises ValueError if the arguments make no sense together."""
    device: Device = args.device
    args.device = replace(device, chunk=args.chunk or device.chunk, longest=args.longest or device.longest)
    given = [variants.given(text) for text in args.variant]
    names = args.variants.split(",") if args.variants else list(device.variants)
    found = variants.chosen(names, given, cuda=device.name == CUDA)
    args.variants, args.base = found, base_of([v.name for v in found])


def base_of(names: Sequence[str]) -> str:
    """Return the variant that the other variants are compared with: fcfs, or the first."""
    return FCFS if FCFS in names else names[0]


def piece_of_open(
    name: str, compared: Compared, workload: named.Workload, base: str, settings: Settings, how: str, out: Path
) -> Piece:
    """Return tables and ratios of a comparison; draws its picture in ``out``."""
    seen = {name: [a for answers in rounds for a in answers] for name, rounds in compared.answers.items()}
    curves = {kind: {n: curve(answers, kind) for n, answers in seen.items()} for kind in KINDS}
    title, picture = f"{workload.name} at {settings.utilisation:.0%} of capacity", f"{name}.svg"
    distributions(curves, title, out / picture)
    over, figures = tables.ratios(compared, base)
    offered = len(next(iter(compared.answers.values()))[0]) / settings.span_s
    kind = "short prompts" if isinstance(workload, named.Sea) else "prompts"
    measured = f"that {compared.measured.variant} does in a closed loop of the workload's {kind}"
    if compared.measured.variant == SIMULATED:
        measured = f"that {SIMULATED} does with all of them waiting"
    text = (
        f"{workload.what}. {how} Offered: {settings.utilisation:.0%} of the {compared.measured.capacity_per_s:.1f} "
        f"requests/s {'given as capacity' if settings.capacity_per_s else measured}, {offered:.1f} requests/s in the "
        f"first round; {settings.rounds} rounds of {settings.span_s:g} s of arrivals, the same for every variant."
    )
    if workload.reuses and "new tokens only" in how:
        text += " Its prompts share beginnings, which a prefill server alone cannot show: see the run with --pd."
    data = {
        "settings": vars(settings), "measured": compared.measured.as_dict(), "rounds": compared.comparison.rounds,
        "pooled": {n: compared.pooled(n) for n in seen}, "busy": compared.busy,
        "curves_ms": curves,
    }  # fmt: skip
    return Piece(
        name, title, text, settings.seed, [*tables.results(compared, title), *over],
        [*tables.judged(compared, workload.name), *figures],
        {picture: "Distribution of the time to first token; the dotted line is P90."}, data,
    )  # fmt: skip


def how_served(device: Device, pd: bool, new_only: bool) -> str:
    """Return a description of the servers, for the report."""
    path = "Router, prefill and decode server, end to end" if pd else "A prefill server alone"
    return f"{path}{', new tokens only' if new_only else ''}; chunks of {device.chunk} tokens, {device.what}."


def run(
    args: argparse.Namespace, up: Fleet | None = None, done: Callable[[Compared], None] = lambda _: None
) -> Iterator[tuple[Piece, Path]]:
    """Run each workload; yield its piece and folder. All workloads use the same servers: ``up``, if given. ``done``: is
    called with the answers of each open load."""
    device, longest, say = args.device, args.device.longest, args.say
    scale = named.Scale(longest, min(longest, LONG_CHUNKS * device.chunk))
    reuses = any(name != named.CLOSED and named.make(name, scale).reuses for name in args.workload)
    if reuses and device.emulated and not args.pd:
        device = device.with_prefixes()
    reuse = device.prefixes or args.pd
    kind = SessionPrompts if device.prefixes else Prompts
    prompts = kind(device.vocabulary, args.seed, longest, reuse, not args.pd)
    names = [v.name for v in args.variants]
    given = args.rounds, args.seconds, args.utilisation, args.seed
    settings = Settings(*given, longest, capacity_per_s=args.capacity)
    how = how_served(device, args.pd, new_only=not reuse)
    # Emulated results have their own folders: they must not replace results of the same load on this machine.
    prefix = "emulated-" if device.emulated else ""
    folders = [(args.out or model.REPO / "out") / f"{'' if args.out else 'serve-'}{prefix}{w}" for w in args.workload]
    if args.out and len(folders) == 1:
        folders = [args.out]
    fleet = up or Fleet(device, args.variants, prompts, folders[0], say, args.pd)
    with nullcontext() if up else fleet:
        bench, lone = Bench(fleet, names, prompts, settings, say), None
        for name, out in zip(args.workload, folders, strict=True):
            workload = named.make("lmsys" if name == named.CLOSED else name, scale)
            if name == named.CLOSED:
                yield piece_of_closed(bench.closed(workload, args.concurrency), how, args, out), out
                continue
            if device.emulated:
                measured = simulated(device, workload, settings)
            else:
                measured = bench.measure(args.base, workload, lone)
            lone = measured.lone
            seen = bench.run(workload, measured)
            done(seen)
            yield piece_of_open(prefix + name, seen, workload, args.base, settings, how, out), out


def piece_of_closed(points: Points, how: str, args: argparse.Namespace, out: Path) -> Piece:
    """Return tables, ratios and the picture of closed loops."""
    over, figures = tables.closed(points, args.base)
    names = [variant.name for variant in args.variants]
    panels = {
        label: {name: [at.median(name, key) for at in points.values()] for name in names}
        for key, label in (("requests_per_s", "requests/s"), ("p90_ms", "TTFT P90 (ms)"))
    }
    pictures.lines(list(points), panels, "clients", out / "closed.svg", title="Closed loop of LMSYS lengths")
    text = (
        f"Closed loops of {BLOCK * BLOCKS} prompts with LMSYS-Chat-1M lengths, the same for all, until the last one is "
        f"answered. {how} {args.rounds} rounds."
    )
    captions = {"closed.svg": "Requests/s and TTFT P90 over the number of clients."}
    data = {"points": {str(n): {name: at.by_figure(name) for name in names} for n, at in points.items()}}
    return Piece("closed", "Closed loops", text, args.seed, over, figures, captions, data)


COMMAND = Command("benchmark.serve", __doc__, run, options, check_arguments, rounds=5, seed=1, seconds=10.0)
